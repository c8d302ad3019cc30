"""Where the documents of a batch begin, from whatever the batch says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import BatchError
from longspan.layout import Layout

DOCUMENT_FIELDS = (
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
"""Fields that say where documents lie; they are consumed, and position_ids are made anew for the part."""

Starts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Documents:
    """Documents and positions of a batch of rows.

    Args:
        starts: first tokens of each row's documents; None when each row is one document.
        positions: position ids on the host, [B, S], or [3, B, S] along time, height and width (M-RoPE); None when each
            row counts from 0.
        lengths: real tokens of each row; None when nothing is padded.
        max_position: largest position id of the batch as it was given; padding counts only if the batch numbers it.
    """

    tokens: int
    starts: Starts | None
    positions: Tensor | None
    lengths: tuple[int, ...] | None
    rows: int
    max_position: int

    @classmethod
    def find(cls, batch: Mapping[str, Any], rows: int, tokens: int) -> Documents:
        """Read document borders from cu_seqlens, restarting position ids or an integer mask.

        Cost: one copy of these fields to the host if they live on a GPU.

        Raises:
            BatchError: padding on the left or inside, a mask per pair of tokens, or sources that disagree.
        """
        numbered, lengths = _read_mask(batch.get("attention_mask"), rows, tokens)
        axes, text = _read_axes(batch.get("position_ids"), rows, tokens)
        positions = _read_positions(text, rows, tokens)
        largest = tokens - 1 if positions is None else int(positions.max())
        if positions is not None:
            positions, lengths = _continue_padding(positions, lengths)
        real = [tokens] * rows if lengths is None else lengths
        sources = {
            "cu_seqlens": _read_borders(batch, rows, tokens),
            "attention_mask": numbered,
            "seq_idx": _read_numbers(batch.get("seq_idx"), real, tokens),
            "position_ids": None if positions is None else _restarts(positions),
        }
        given = {name: starts for name, starts in sources.items() if starts is not None}
        if positions is not None and len(given) == 1:
            _refuse_jumps(positions, real)
        starts = _agreed(given, real)
        if axes is not None:
            if starts is None:
                _refuse_restarts(axes, real)
            positions, largest = axes, int(axes.max())
        elif starts is not None and positions is None:
            positions = _count_from(starts, tokens)
            largest = int(positions.max())
        packed = starts if starts and any(len(s) > 1 for s in starts) else None
        return cls(tokens, packed, positions, lengths, rows, largest)

    def cut_positions(self, layout: Layout, rank: int) -> Tensor:
        """Return the position ids of a rank's tokens, [(3,) B, S/sp]; padding never goes beyond `max_position`."""
        pieces = layout.pieces(rank)
        if self.positions is None:
            row = torch.cat([torch.arange(p.start, p.stop) for p in pieces])
            return row.clamp(max=self.tokens - 1).expand(self.rows, -1).contiguous()
        tail = [self.positions[..., -1:]] * (layout.length - self.tokens)
        full = torch.cat([self.positions, *tail], -1).clamp(max=self.max_position)
        return torch.cat([full[..., p.start : p.stop] for p in pieces], -1)

    def last_tokens(self) -> tuple[Tensor, Tensor]:
        """Return rows and token indices of the last token of each document but the last of each row."""
        pairs = [(row, start - 1) for row, starts in enumerate(self.starts or ()) for start in starts[1:]]
        rows, tokens = zip(*pairs, strict=True) if pairs else ((), ())
        return torch.tensor(rows, dtype=torch.long), torch.tensor(tokens, dtype=torch.long)

    def refuse_labels_on_padding(self, labels: Tensor, ignore_index: int) -> None:
        """Raise if a padded token has a label: one device would train on it or not depending on the loss."""
        if self.lengths is None:
            return
        for row, length in enumerate(self.lengths):
            wrong = int((labels[row, length:] != ignore_index).sum())
            if wrong:
                raise BatchError(
                    f"Row {row} has {wrong} labels on padding (tokens {length} and later); set them to {ignore_index}."
                )


def _read_mask(mask: Any, rows: int, tokens: int) -> tuple[Starts | None, tuple[int, ...] | None]:
    """Return documents numbered by the mask, and the real length of each row where some are padded."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, tokens):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchError(
            f"attention_mask must be [{rows}, {tokens}] with 1 for tokens, 0 for padding on the right, or integers "
            f"that number the documents; got {shape}. A mask per pair of tokens cannot be divided over ranks: "
            "describe documents by cu_seqlens or by position_ids that restart."
        )
    host = mask.to("cpu", torch.long)
    if int(host.min()) < 0 or not torch.equal(host.to(mask.dtype), mask.to("cpu")):
        raise BatchError(
            "attention_mask must hold 1 for tokens and 0 for padding, or integers that number the documents; it has "
            "other values."
        )
    real = host != 0
    lengths = real.sum(1)
    if not torch.equal(real, torch.arange(tokens) < lengths[:, None]):
        row = int((real != (torch.arange(tokens) < lengths[:, None])).any(1).nonzero()[0])
        raise BatchError(
            f"Row {row} of attention_mask has padding before or between its {int(lengths[row])} tokens. Pad on the "
            "right (tokenizer.padding_side = 'right')."
        )
    if int(lengths.min()) == 0:
        raise BatchError(f"Row {int(lengths.argmin())} of attention_mask holds no token; drop that row.")
    padded = None if int(lengths.min()) == tokens else tuple(lengths.tolist())
    return (_changes("attention_mask", host, lengths.tolist()) if int(host.max()) > 1 else None), padded


def _read_numbers(numbers: Any, lengths: Sequence[int], tokens: int) -> Starts | None:
    """Return documents from seq_idx, which numbers the document of each token."""
    if numbers is None:
        return None
    rows = len(lengths)
    if not isinstance(numbers, Tensor) or tuple(numbers.shape) != (rows, tokens):
        shape = list(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        raise BatchError(f"seq_idx must be [{rows}, {tokens}], got {shape}.")
    return _changes("seq_idx", numbers.to("cpu", torch.long), lengths)


def _changes(name: str, numbers: Tensor, lengths: Sequence[int]) -> Starts:
    """Return where the number of a row changes, up to its length; no number may come back after another."""
    starts = []
    for row, length in zip(numbers, lengths, strict=True):
        firsts = [0, *((row[1:length] != row[: length - 1]).nonzero().flatten() + 1).tolist()]
        told = row[firsts].tolist()
        if len(set(told)) < len(told):
            again = next(n for i, n in enumerate(told) if n in told[:i])
            raise BatchError(
                f"Row {len(starts)}: {name} gives tokens that are apart the same document number {again}; the tokens "
                "of a document must follow each other."
            )
        starts.append(tuple(firsts))
    return tuple(starts)


def _read_axes(positions: Any, rows: int, tokens: int) -> tuple[Tensor | None, Any]:
    """Take position ids along time, height and width [3, B, S] apart from those of text, the first of four rows."""
    if not isinstance(positions, Tensor) or positions.dim() != 3:
        return None, positions
    if tuple(positions.shape[1:]) != (rows, tokens) or len(positions) not in (3, 4) or positions.is_floating_point():
        raise BatchError(
            f"position_ids of images must be integers [3, {rows}, {tokens}], or [4, {rows}, {tokens}] with those of "
            f"text in front, got {positions.dtype} {list(positions.shape)}."
        )
    axes = positions[-3:].to("cpu", torch.long)
    if int(axes.min()) < 0:
        raise BatchError("position_ids of images hold negative numbers; mark padding in attention_mask.")
    return axes, None if len(positions) == 3 else positions[0]


def _refuse_restarts(axes: Tensor, lengths: Sequence[int]) -> None:
    """Raise where position ids [3, B, S] come back to the origin: nothing says whether a document begins there."""
    for row, length in enumerate(lengths):
        at = (axes[:, row, 1:length] == 0).all(0).nonzero()
        if len(at):
            raise BatchError(
                f"Row {row}: position_ids {list(axes.shape)} start again at token {int(at[0]) + 1}, and nothing says "
                "whether a document begins there: pass cu_seqlens too, or four rows, those of text in front."
            )


def _read_positions(positions: Any, rows: int, tokens: int) -> Tensor | None:
    if positions is None:
        return None
    if not isinstance(positions, Tensor) or tuple(positions.shape) not in {(rows, tokens), (1, tokens), (tokens,)}:
        shape = list(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise BatchError(f"position_ids must be [{rows}, {tokens}], [1, {tokens}] or [{tokens}], got {shape}.")
    if positions.is_floating_point():
        raise BatchError(f"position_ids must be integers, got {positions.dtype}.")
    return positions.to("cpu", torch.long).reshape(-1, tokens).expand(rows, tokens)


def _continue_padding(positions: Tensor, lengths: tuple[int, ...] | None) -> tuple[Tensor, tuple[int, ...] | None]:
    """Let padded tokens count on from the last real one; position ids of -1 mark padding too."""
    marked = positions < 0
    if bool(marked.any()):
        real = (~marked).sum(1)
        if not torch.equal(~marked, torch.arange(positions.shape[1]) < real[:, None]) or int(real.min()) == 0:
            raise BatchError("Negative position_ids may only mark padding on the right, behind at least one token.")
        if lengths is not None and tuple(real.tolist()) != lengths:
            raise BatchError("attention_mask and negative position_ids mark different tokens as padding.")
        lengths = tuple(real.tolist())
    if lengths is None:
        return positions, None
    positions = positions.clone()
    for row, length in enumerate(lengths):
        missing = positions.shape[1] - length
        positions[row, length:] = positions[row, length - 1] + torch.arange(1, missing + 1)
    return positions, lengths


def _refuse_jumps(positions: Tensor, lengths: Sequence[int]) -> None:
    """Raise where positions leave some out: nothing says whether a document begins there."""
    for row, length in enumerate(lengths):
        ids = positions[row, :length]
        at = (ids[1:] > ids[:-1] + 1).nonzero()
        if len(at):
            token = int(at[0]) + 1
            raise BatchError(
                f"Row {row}: position_ids jump from {int(ids[token - 1])} to {int(ids[token])} at token {token}. If a "
                "document begins there, pass cu_seqlens too; gaps inside a document are not supported."
            )


def _restarts(positions: Tensor) -> Starts:
    moved = positions[:, 1:] != positions[:, :-1] + 1
    return tuple((0, *(row.nonzero().flatten() + 1).tolist()) for row in moved)


def _read_borders(batch: Mapping[str, Any], rows: int, tokens: int) -> Starts | None:
    """Return documents from cu_seqlens over the rows laid one after the other."""
    found = {
        name: batch[name] for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k") if batch.get(name) is not None
    }
    if not found:
        return None
    lists = {name: _integers(name, value) for name, value in found.items()}
    name, borders = next(iter(lists.items()))
    if any(other != borders for other in lists.values()):
        raise BatchError(f"{' and '.join(lists)} describe different documents; pass one of them.")
    rising = len(borders) > 1 and all(a < b for a, b in zip(borders, borders[1:], strict=False))
    if not rising or borders[0] != 0 or borders[-1] != rows * tokens:
        raise BatchError(
            f"{name} must rise from 0 to the batch's {rows * tokens} tokens without empty documents, got "
            f"{borders[:6]}{' ...' if len(borders) > 6 else ''} (ends at {borders[-1] if borders else None})."
        )
    missing = [row for row in range(rows) if row * tokens not in borders]
    if missing:
        raise BatchError(f"{name} lets a document cross from row {missing[0] - 1} into row {missing[0]}.")
    return tuple(
        tuple(b - row * tokens for b in borders if row * tokens <= b < (row + 1) * tokens) for row in range(rows)
    )


def _integers(name: str, value: Any) -> list[int]:
    """Read a list of integers, or a tensor of them."""
    try:
        numbers = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(f"{name} must be a list or tensor of integers, got {type(value).__name__}: {error}.") from None
    if numbers.is_floating_point() and numbers.numel():
        raise BatchError(f"{name} must be a list or tensor of integers, got {numbers.dtype}.")
    return numbers.flatten().tolist()


def _agreed(given: dict[str, Starts], lengths: Sequence[int]) -> Starts | None:
    """Return the one description that all sources share; what they say about padding does not count."""
    if not given:
        return None
    real = {
        name: tuple(tuple(s for s in row if s < length) for row, length in zip(starts, lengths, strict=True))
        for name, starts in given.items()
    }
    (first, starts), *others = real.items()
    for name, other in others:
        for row in range(len(lengths)):
            if starts[row] != other[row]:
                raise BatchError(
                    f"Row {row}: {first} puts documents at {list(starts[row][:5])}, {name} at {list(other[row][:5])}. "
                    "Pass one of them, or make them agree."
                )
    return starts


def _count_from(starts: Starts, tokens: int) -> Tensor:
    """Return positions that restart at each document."""
    rows = []
    for row in starts:
        first = torch.zeros(tokens, dtype=torch.long)
        first[list(row)] = torch.tensor(row)
        rows.append(torch.arange(tokens) - first.cummax(0).values)
    return torch.stack(rows)

"""From a full batch to one rank's part: documents, shifted labels, padding, positions."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention.schedule import Schedule
from longspan.documents import DOCUMENT_FIELDS, Documents
from longspan.errors import BatchError
from longspan.layout import Layout, Piece
from longspan.mask import Mask
from longspan.mesh import Mesh
from longspan.needs import Needs
from longspan.plan.exchange import ALONE, AUTOMATIC, Decision, ExchangeRule
from longspan.recurrent.build import Share
from longspan.segments import segment_layout
from longspan.stream.prefix import Tiles

if TYPE_CHECKING:
    from longspan.images import Route

IGNORE_INDEX = -100
"""Label of a token without a target, as in torch's cross-entropy."""

CONTEXT = "longspan"
"""Name under which a part carries its `Shard` into the model."""

CACHES = ("past_key_values", "cache")
"""Names under which models of transformers take a KV cache."""

_TOKEN_FIELDS = ("input_ids", "inputs_embeds", "token_type_ids")
LABEL_FIELDS = ("labels", "shift_labels")


@dataclass(frozen=True)
class Shard:
    """What a rank must know about its part of a batch; every tensor of the part follows `layout`.

    Args:
        rows: rows of the batch.
        max_position: largest position id of the whole batch, on every rank.
        targets: tokens with a target in the whole batch; an integer, or a tensor when the labels live on a GPU.
        num_items: targets over which the loss is averaged; None for those of this micro-batch over all data ranks.
        lengths: real tokens of each row, None when the batch came without padding.
        tile_tokens: tokens per tile in which this rank's layers run; None when they run whole.
        passed: names of the fields that were handed through as they came.
        fingerprint: the same on ranks that were given the same batch; 0 if it was not taken.
        route: how features of images reach this rank's tokens; None for models without images.
        exchange: how keys come to the queries of other ring ranks, and why.
    """

    mesh: Mesh
    layout: Layout
    mask: Mask
    rows: int
    max_position: int
    targets: int | Tensor
    num_items: int | Tensor | None = None
    lengths: tuple[int, ...] | None = None
    tile_tokens: int | None = None
    passed: tuple[str, ...] = ()
    fingerprint: int = 0
    route: Route | None = None
    exchange: Decision = ALONE
    views: dict[int, Shard | None] = field(default_factory=dict, compare=False, repr=False)

    def share(self, heads: int, halo: int, device: torch.device) -> Share:
        """Return what this rank works on of recurrences with so many heads, worked out once for all layers.

        Args:
            halo: tokens before its own that their convolutions see.
        """
        key = (heads, halo, device)
        if key not in self._shares:
            self._shares[key] = Share.of(self.mask, self.rows, self.layout, self.mesh.sequence, heads, halo, device)
        return self._shares[key]

    @cached_property
    def _shares(self) -> dict[tuple[int, int, torch.device], Share]:
        return {}

    def within(self, window: int | None) -> Shard:
        """Return the part as layers see it whose tokens see so many tokens; worked out once for all of them."""
        if window is None:
            return self
        if window not in self.views:
            mask = self.mask.within(window)
            self.views[window] = None if mask == self.mask else replace(self, mask=mask, views={})
        return self.views[window] or self

    @cached_property
    def schedule(self) -> Schedule:
        """Kernel calls of this rank, worked out at first use and then shared by all layers."""
        return Schedule.of(self.mask, self.layout, self.mesh.ring.rank, self.exchange.exchange, self.rows)

    @cached_property
    def tiles(self) -> Tiles:
        """Tiles of this rank's tokens, each with its kernel calls, for layers that run in tiles."""
        step = self.tile_tokens or self.layout.shard_tokens
        local = [Piece(a, min(a + step, self.layout.shard_tokens)) for a in range(0, self.layout.shard_tokens, step)]
        return Tiles.of(self.mask, local, self.layout.ulysses)

    def cut(self, field: Tensor, fill: int | float = 0) -> Tensor:
        """Return this rank's tokens of a full field [B, S, ...] -> [B, S/sp, ...], padding with `fill`."""
        return cut(field, self.layout, self.mesh.sequence.rank, fill)


def shard_batch(
    batch: Mapping[str, Any],
    mesh: Mesh,
    *,
    num_items: int | Tensor | None = None,
    token_fields: Sequence[str] = (),
    tile_tokens: int | None = None,
    axes: bool = False,
    exchange: ExchangeRule = AUTOMATIC,
    told_apart: bool = True,
) -> dict[str, Any]:
    """Cut a full batch into the part of this rank. Pure: no collective, the batch is left as it is.

    Args:
        batch: the same full batch on every sequence-parallel rank: input_ids [B, S] or inputs_embeds [B, S, d];
            labels [B, S], or shift_labels if they are shifted already; position_ids, attention_mask (right padding, or
            integers that number the documents) and cu_seqlens as far as present. A field that is None is absent.
        num_items: targets of the whole optimizer step over data ranks and accumulated micro-batches, this one included.
        token_fields: names of further tensors [B, S, ...] that are to be cut like the tokens.
        tile_tokens: tokens per tile in which layers run; under Ulysses alone, tiles are interleaved over the ranks.
        axes: position_ids may be [3, B, S], of time, height and width, or [4, B, S] with those of text in front.
        exchange: decides how keys come to other ring ranks; gathered, a packed row is divided by its documents.
        told_apart: give the part a fingerprint, which takes a look at all of the batch.

    Returns:
        input_ids or inputs_embeds, position_ids and shift_labels of this rank, `use_cache=False`, and a `Shard`.

    Raises:
        BatchError: a field is missing, unknown or of the wrong shape or type; padding on the left; documents that
            disagree; fewer `num_items` than this batch has targets.
    """
    batch = present(batch)
    _refuse_axes(None if axes else batch.get("position_ids"))
    rows, length = (tokens := _tokens(batch)).shape[:2]
    documents = Documents.find(batch, rows, length)
    layout, decision = _divide(documents, mesh, tile_tokens, exchange)
    _check_token_fields(batch, token_fields)
    labels = _shifted_labels(batch, documents, rows, length)
    names, targets = {*_TOKEN_FIELDS, *token_fields}, _count(labels)
    given = {name: _aligned(name, value, rows, length) for name, value in batch.items() if name in names}
    passed = _passed(batch, names)
    shard = Shard(
        mesh=mesh,
        layout=layout,
        mask=Mask(layout.length, documents.starts),
        rows=rows,
        max_position=documents.max_position,
        targets=targets,
        num_items=_checked_items(num_items, targets),
        lengths=documents.lengths,
        tile_tokens=tile_tokens,
        passed=tuple(passed),
        fingerprint=_fingerprint(documents, {**given, "shift_labels": labels}) if told_apart else 0,
        exchange=decision,
    )
    part: dict[str, Any] = {name: shard.cut(value) for name, value in given.items()} | passed
    part["position_ids"] = documents.cut_positions(layout, mesh.sequence.rank).to(tokens.device)
    if labels is not None:
        part["shift_labels"] = shard.cut(labels, IGNORE_INDEX)
    return part | {"use_cache": False, CONTEXT: shard}


def count_targets(batch: Mapping[str, Any]) -> int | Tensor:
    """Return the tokens of a full batch that have a target, each once; a tensor when the labels live on a GPU.

    Raises:
        BatchError: as `shard_batch`.
    """
    batch = present(batch)
    rows, length = batch_size(batch)
    labels = _shifted_labels(batch, Documents.find(batch, rows, length), rows, length)
    return _count(labels)


def present(batch: Any) -> Mapping[str, Any]:
    """Return the fields of a full batch that are not None.

    Raises:
        BatchError: it is no mapping, or cut already.
    """
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"A batch is a mapping of field names to tensors, {{'input_ids': [B, S], 'labels': [B, S], ...}}, got "
            f"{type(batch).__name__}."
        )
    if CONTEXT in batch:
        raise BatchError("This batch is sharded already; shard the full batch once.")
    return {name: value for name, value in batch.items() if value is not None}


def batch_size(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows of a full batch, and their tokens.

    Raises:
        BatchError: it has no tokens.
    """
    rows, tokens = _tokens(batch).shape[:2]
    return rows, tokens


def cut(field: Tensor, layout: Layout, rank: int, fill: int | float = 0) -> Tensor:
    """Return a rank's tokens of a field [B, S, ...] -> [B, S/sp, ...], the row padded with `fill`."""
    missing = layout.length - field.shape[1]
    if missing:
        field = F.pad(field, [0, 0] * (field.dim() - 2) + [0, missing], value=fill)
    return torch.cat([field[:, piece.start : piece.stop] for piece in layout.pieces(rank)], dim=1)


def uncut(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """Join the parts [B, S/sp, ...] of all ranks into the full field [B, S, ...], without padding."""
    full = parts[0].new_empty(parts[0].shape[0], layout.length, *parts[0].shape[2:])
    for rank, part in enumerate(parts):
        offset = 0
        for piece in layout.pieces(rank):
            full[:, piece.start : piece.stop] = part[:, offset : offset + len(piece)]
            offset += len(piece)
    return full[:, : layout.tokens]


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    names = [name for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None]
    if len(names) != 1:
        raise BatchError(f"A batch needs input_ids or inputs_embeds, and not both; it has {sorted(batch)}.")
    name, tokens = names[0], batch[names[0]]
    dims = 2 if name == "input_ids" else 3
    if not isinstance(tokens, Tensor) or tokens.dim() != dims or 0 in tokens.shape[:2]:
        shape = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise BatchError(
            f"{name} must be a tensor {'[B, S]' if dims == 2 else '[B, S, d]'} with at least one token, got {shape}."
        )
    return tokens if dims == 3 else _integers(name, tokens)


def _integers(name: str, field: Tensor) -> Tensor:
    if field.is_floating_point() or field.is_complex() or field.dtype == torch.bool:
        raise BatchError(f"{name} must hold integers, numbers of tokens, got {field.dtype}.")
    return field


def _check_token_fields(batch: Mapping[str, Any], token_fields: Sequence[str]) -> None:
    if isinstance(token_fields, str):
        raise BatchError(f"token_fields is a sequence of names, got {token_fields!r}; pass ({token_fields!r},).")
    for name in token_fields:
        if name not in batch:
            raise BatchError(f"token_fields names '{name}', which the batch does not have; it has {sorted(batch)}.")
        if name in (*LABEL_FIELDS, *DOCUMENT_FIELDS, "use_cache"):
            raise BatchError(f"token_fields names '{name}', which is cut without being named; leave it out.")


def _refuse_axes(positions: Any) -> None:
    if isinstance(positions, Tensor) and positions.dim() > 2:
        raise BatchError(
            f"position_ids must be [B, S], [1, S] or [S] for this model, which has no axes of images, "
            f"got {list(positions.shape)}."
        )


def _aligned(name: str, value: Any, rows: int, length: int) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[:2] != (rows, length):
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise BatchError(f"{name} must be a tensor [{rows}, {length}, ...] like the tokens of this batch, got {shape}.")
    return value


def _passed(batch: Mapping[str, Any], cut_names: set[str]) -> dict[str, Any]:
    """Return the fields that go into the part as they are."""
    _refuse_cache(batch)
    known = {*cut_names, *LABEL_FIELDS, *DOCUMENT_FIELDS, *CACHES, "use_cache"}
    passed = {name: value for name, value in batch.items() if name not in known}
    for name, value in passed.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            raise BatchError(
                f"Field '{name}' {list(value.shape)} is not known: pass token_fields=('{name}',) if it has one entry "
                "per token [B, S, ...], or take it out of the batch."
            )
    return passed


def _refuse_cache(batch: Mapping[str, Any]) -> None:
    given = [name for name in (*CACHES, "use_cache") if batch.get(name) is not None and batch[name] is not False]
    if given:
        raise BatchError(
            f"A KV cache cannot be used with a sharded sequence: drop {' and '.join(given)}; to generate, use "
            "`with handle.bypass():`."
        )


def _shifted_labels(batch: Mapping[str, Any], documents: Documents, rows: int, length: int) -> Tensor | None:
    """Return the label of the next token of the same document for each token, or None without labels."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    if labels is None and shifted is None:
        return None
    if labels is not None and shifted is not None:
        raise BatchError("A batch holds labels or shift_labels, not both.")
    if shifted is not None:
        shifted = _integers("shift_labels", _aligned("shift_labels", shifted, rows, length))
        documents.refuse_labels_on_padding(shifted, IGNORE_INDEX)
        return shifted
    labels = _integers("labels", _aligned("labels", labels, rows, length))
    documents.refuse_labels_on_padding(labels, IGNORE_INDEX)
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    if documents.starts is not None:
        rows_at, tokens_at = documents.last_tokens()
        shifted[rows_at.to(labels.device), tokens_at.to(labels.device)] = IGNORE_INDEX
    return shifted


def _divide(documents: Documents, mesh: Mesh, tile_tokens: int | None, rule: ExchangeRule) -> tuple[Layout, Decision]:
    """Divide rows over a mesh: under Ulysses alone tiles are interleaved; where keys are gathered, by documents."""
    ring, ulysses = mesh.ring.size, mesh.ulysses.size
    if ring == 1:
        return Layout(documents.tokens, 1, ulysses, tile_tokens if ulysses > 1 else None), ALONE
    plain = Layout(documents.tokens, ring, ulysses)
    decision = rule.before(documents.rows, documents.starts is not None)
    if documents.starts is None or documents.rows > 1 or (decision and decision.exchange == "ring"):
        assert decision is not None
        return plain, decision
    divided = segment_layout(documents.tokens, documents.starts[0], ring, ulysses)
    if decision is None:
        decision = rule.decide(Needs.of(Mask(divided.length, documents.starts), divided), ring)
    return (divided if decision.exchange == "gather" else plain), decision


def _fingerprint(documents: Documents, fields: Mapping[str, Tensor | None]) -> int:
    """Return a number that tells batches apart: by documents and shapes, and by content that is on the host."""
    seen = zlib.crc32(repr((documents.starts, documents.lengths)).encode())
    for name, values in fields.items():
        if values is None:
            continue
        seen = zlib.crc32(repr((name, tuple(values.shape), values.dtype)).encode(), seen)
        if values.device.type == "cpu":
            seen = zlib.crc32(values.detach().contiguous().view(torch.uint8).numpy().data, seen)
    return seen


def _checked_items(items: Any, targets: int | Tensor) -> int | Tensor | None:
    """Return the targets of a step as they are, if they can be that beside those of this batch; what is on a GPU is not
    read back."""
    whole = isinstance(items, int) and not isinstance(items, bool) and items >= 0
    if isinstance(items, Tensor):
        whole = items.dim() == 0 and not items.dtype.is_floating_point and items.dtype != torch.bool
    if items is not None and not whole:
        raise BatchError(f"num_items counts targets: a whole number >= 0 or a 0-d integer tensor, got {items!r}.")
    if items is None or any(isinstance(count, Tensor) and count.device.type != "cpu" for count in (items, targets)):
        return items
    if int(items) < targets:
        raise BatchError(
            f"num_items is {int(items)}, but this batch alone has {targets} targets: it counts those of the whole "
            "optimizer step, over all data ranks and accumulated micro-batches. Add up longspan.batch.count_targets of "
            "these, let handle.loader count, or leave num_items out where the step is this one batch."
        )
    return items


def _count(labels: Tensor | None) -> int | Tensor:
    if labels is None:
        return 0
    count = (labels != IGNORE_INDEX).sum()
    return count if count.is_cuda else int(count)

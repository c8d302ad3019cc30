"""The Ulysses exchange: tokens of all heads to all tokens of some heads, and back, all tensors travelling together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.pending import Pending
from longspan.layout import Piece
from longspan.mesh import Axis

Heads = Sequence[Sequence[range]]
"""For each tensor of an exchange and each rank of the axis, the heads that rank works on."""

_UNITS = (torch.complex128, torch.int64, torch.int32)


def to_heads(
    tensors: Sequence[Tensor], heads: Heads, axis: Axis, parts: Sequence[Piece] = (), borrow: bool = False
) -> Pending[list[Tensor]]:
    """Start exchanging a part of the tokens with all heads for all tokens with a part of the heads.

    Args:
        tensors: [B, s, H_i, D_i] each, of one dtype, for example q, k and v; they must stay as they are until the
            exchange has been waited for, and may be let go at once.
        parts: ranges of the s tokens that are interleaved with those of the other ranks; empty for one of them all.
        borrow: the results will be read only by what is queued before the third such exchange after this one starts,
            and not written to, so that copy engines need not copy them out of shared memory.

    Returns:
        [B, s * size, h_i, D_i] each: for each part, its tokens in rank order; last dim contiguous.

    Cost: with the axis's copy engines see `CopyEngine`. Else one all-to-all; one copy to lay the heads out by
        destination, and one more when rows or parts are several.
    """
    if axis.size == 1:
        return Pending([], lambda: list(tensors))
    if axis.copier is not None:
        return axis.copier.to_heads(tensors, heads, parts, borrow)
    batch, tokens = tensors[0].shape[:2]
    dims = [t.shape[-1] for t in tensors]
    widths = [sum(len(h[j]) * d for h, d in zip(heads, dims, strict=True)) for j in range(axis.size)]
    rows = batch * tokens
    sent = tensors[0].new_empty(rows * sum(widths))
    for j, part in enumerate(sent.split([rows * w for w in widths])):
        runs = part.view(batch, tokens, widths[j]).split([len(h[j]) * d for h, d in zip(heads, dims, strict=True)], -1)
        for run, t, h in zip(runs, tensors, heads, strict=True):
            copy(run.unflatten(-1, (len(h[j]), t.shape[-1])), t[:, :, h[j].start : h[j].stop])
    width = widths[axis.rank]
    received = sent.new_empty(axis.size * rows * width)
    request = dist.all_to_all_single(
        received, sent, [rows * width] * axis.size, [rows * w for w in widths], axis.group, async_op=True
    )

    def finish() -> list[Tensor]:
        joined = _joined(received.view(axis.size, batch, tokens, width), parts)
        counts = [len(h[axis.rank]) for h in heads]
        runs = joined.split([n * d for n, d in zip(counts, dims, strict=True)], -1)
        return [run.unflatten(-1, (n, d)) for run, n, d in zip(runs, counts, dims, strict=True)]

    return Pending([request], finish, sent, axis.waits)


def to_tokens(
    tensors: Sequence[Tensor], heads: Heads, axis: Axis, parts: Sequence[Piece] = (), borrow: bool = False
) -> Pending[list[Tensor]]:
    """Start undoing `to_heads`: a part of the tokens with the heads of every rank for all tokens with some heads.

    Args:
        tensors: [B, s * size, h_i, D_i] each, of one dtype.
        parts, borrow: as for `to_heads`.

    Returns:
        [B, s, sum of h_i over ranks, D_i] each, heads in rank order; a head that several ranks worked on appears once
        for each of them.

    Cost: with the axis's copy engines see `CopyEngine`. Else one all-to-all and two copies.
    """
    if axis.size == 1:
        return Pending([], lambda: list(tensors))
    if axis.copier is not None:
        return axis.copier.to_tokens(tensors, heads, parts, borrow)
    batch, tokens = tensors[0].shape[0], tensors[0].shape[1] // axis.size
    dims = [t.shape[-1] for t in tensors]
    widths = [sum(len(h[j]) * d for h, d in zip(heads, dims, strict=True)) for j in range(axis.size)]
    rows, width = batch * tokens, widths[axis.rank]
    sent = tensors[0].new_empty(axis.size, batch, tokens, width)
    runs = sent.split([len(h[axis.rank]) * d for h, d in zip(heads, dims, strict=True)], -1)
    for run, t in zip(runs, tensors, strict=True):
        for part in parts or [Piece(0, tokens)]:
            spread = t[:, part.start * axis.size : part.stop * axis.size].unflatten(1, (axis.size, len(part)))
            copy(run[:, :, part.start : part.stop].unflatten(-1, t.shape[2:]), spread.transpose(0, 1))
    received = sent.new_empty(rows * sum(widths))
    request = dist.all_to_all_single(
        received, sent.view(-1), [rows * w for w in widths], [rows * width] * axis.size, axis.group, async_op=True
    )

    def finish() -> list[Tensor]:
        blocks = [block.view(batch, tokens, -1) for block in received.split([rows * w for w in widths])]
        result, start = [], [0] * axis.size
        for h, d in zip(heads, dims, strict=True):
            counts, at = [len(h[j]) for j in range(axis.size)], 0
            whole = received.new_empty(batch, tokens, sum(counts), d)
            for j, (block, n) in enumerate(zip(blocks, counts, strict=True)):
                copy(whole[:, :, at : at + n], block[..., start[j] : start[j] + n * d].unflatten(-1, (n, d)))
                start[j] += n * d
                at += n
            result.append(whole)
        return result

    return Pending([request], finish, sent, axis.waits)


def copy(destination: Tensor, source: Tensor) -> None:
    """Copy between views of one shape, by units of up to 16 bytes where both allow it.

    A GPU copies strided views element by element; two bytes at a time take a fraction of its bandwidth.
    """
    if destination.dtype == source.dtype:
        destination, source = units(destination, source)
    destination.copy_(source)


def units(*tensors: Tensor) -> list[Tensor]:
    """View tensors of one dtype in units of up to 16 bytes, the largest that all of them allow."""
    unit = next((unit for unit in _UNITS if all(_divides(unit, t) for t in tensors)), tensors[0].dtype)
    return [t.view(unit) for t in tensors]


def _divides(unit: torch.dtype, t: Tensor) -> bool:
    """Whether a view can be read in larger units along its last dim."""
    count = unit.itemsize // t.element_size()
    strides = t.stride()
    return (
        count > 1
        and strides[-1] == 1
        and t.shape[-1] % count == 0
        and t.storage_offset() % count == 0
        and all(stride % count == 0 for stride in strides[:-1])
        and t.data_ptr() % unit.itemsize == 0
    )


def _joined(received: Tensor, parts: Sequence[Piece]) -> Tensor:
    """Put the tokens of all ranks in order: [size, B, s, width] -> [B, s * size, width]."""
    size, batch, tokens, width = received.shape
    if batch == 1 and len(parts) < 2:
        return received.view(1, size * tokens, width)
    joined = received.new_empty(batch, size * tokens, width)
    for part in parts or [Piece(0, tokens)]:
        run = joined[:, part.start * size : part.stop * size].unflatten(1, (size, len(part)))
        copy(run, received[:, :, part.start : part.stop].transpose(0, 1))
    return joined

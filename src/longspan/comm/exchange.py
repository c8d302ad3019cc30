"""The Ulysses exchange: tokens of all heads to all tokens of some heads, and back, in one all-to-all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.pending import Pending
from longspan.mesh import Axis


def to_heads(tensors: Sequence[Tensor], heads: Sequence[Sequence[range]], axis: Axis) -> Pending[list[Tensor]]:
    """Start exchanging a part of the tokens with all heads for all tokens with a part of the heads.

    Args:
        tensors: [B, s, H_i, D_i] each, for example q, k and v; they travel together.
        heads: for each tensor and each rank of the axis, the heads that rank works on.

    Returns:
        [B, s * size, h_i, D_i] each, tokens in rank order; views of one buffer, last dim contiguous.

    Cost: one all-to-all; one copy to lay the heads out by destination, and one more when B > 1.
    """
    if axis.size == 1:
        return Pending([], lambda: list(tensors))
    batch, tokens = tensors[0].shape[:2]
    dims = [t.shape[-1] for t in tensors]
    widths = [sum(len(h[j]) * d for h, d in zip(heads, dims, strict=True)) for j in range(axis.size)]
    rows = batch * tokens
    sent = tensors[0].new_empty(rows * sum(widths))
    for j, part in enumerate(sent.split([rows * w for w in widths])):
        runs = part.view(batch, tokens, widths[j]).split([len(h[j]) * d for h, d in zip(heads, dims, strict=True)], -1)
        for run, t, h in zip(runs, tensors, heads, strict=True):
            run.unflatten(-1, (len(h[j]), t.shape[-1])).copy_(t[:, :, h[j].start : h[j].stop])
    width = widths[axis.rank]
    received = sent.new_empty(axis.size * rows * width)
    request = dist.all_to_all_single(
        received, sent, [rows * width] * axis.size, [rows * w for w in widths], axis.group, async_op=True
    )

    def finish() -> list[Tensor]:
        joined = received.view(axis.size, batch, tokens, width).transpose(0, 1).reshape(batch, -1, width)
        counts = [len(h[axis.rank]) for h in heads]
        runs = joined.split([n * d for n, d in zip(counts, dims, strict=True)], -1)
        return [run.unflatten(-1, (n, d)) for run, n, d in zip(runs, counts, dims, strict=True)]

    return Pending([request], finish, sent)


def to_tokens(tensors: Sequence[Tensor], heads: Sequence[Sequence[range]], axis: Axis) -> Pending[list[Tensor]]:
    """Start undoing `to_heads`: a part of the tokens with the heads of every rank for all tokens with some heads.

    Args:
        tensors: [B, s * size, h_i, D_i] each.
        heads: as for `to_heads`.

    Returns:
        [B, s, sum of h_i over ranks, D_i] each, heads in rank order; a head that several ranks worked on appears once
        for each of them.

    Cost: one all-to-all and two copies.
    """
    if axis.size == 1:
        return Pending([], lambda: list(tensors))
    batch, tokens = tensors[0].shape[0], tensors[0].shape[1] // axis.size
    dims = [t.shape[-1] for t in tensors]
    widths = [sum(len(h[j]) * d for h, d in zip(heads, dims, strict=True)) for j in range(axis.size)]
    rows, width = batch * tokens, widths[axis.rank]
    sent = tensors[0].new_empty(axis.size, batch, tokens, width)
    runs = sent.split([len(h[axis.rank]) * d for h, d in zip(heads, dims, strict=True)], -1)
    for run, t in zip(runs, tensors, strict=True):
        run.unflatten(-1, t.shape[2:]).copy_(t.unflatten(1, (axis.size, tokens)).transpose(0, 1))
    received = sent.new_empty(rows * sum(widths))
    request = dist.all_to_all_single(
        received, sent.view(-1), [rows * w for w in widths], [rows * width] * axis.size, axis.group, async_op=True
    )

    def finish() -> list[Tensor]:
        parts = [part.view(batch, tokens, -1) for part in received.split([rows * w for w in widths])]
        result, start = [], [0] * axis.size
        for h, d in zip(heads, dims, strict=True):
            cuts = [part[..., a : a + len(h[j]) * d] for j, (part, a) in enumerate(zip(parts, start, strict=True))]
            result.append(torch.cat(cuts, -1).unflatten(-1, (-1, d)))
            start = [a + len(h[j]) * d for j, a in enumerate(start)]
        return result

    return Pending([request], finish, sent)

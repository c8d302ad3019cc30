"""The truth about attention, written down once more: dense masked softmax, each token's document from scratch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Starts = Sequence[Sequence[int]]
"""First tokens of each row's documents."""

TOLERANCE = 1e-10
"""Relative, in fp64; an fp32 rounding anywhere is 1e-8 and more."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Starts | None,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally within documents: q [B, S, H, D], k [B, S, K, D], v [B, S, K, Dv] -> [B, S, H, Dv].

    Args:
        window: tokens that each token sees, itself included.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [H] scores of keys without values.
    """
    rows, tokens, heads = q.shape[:3]
    group = heads // k.shape[2]
    document = torch.zeros(rows, tokens, dtype=torch.long)
    for row, firsts in enumerate(starts or ()):
        for first in firsts:
            document[row, first:] += 1
    order = torch.arange(tokens)
    visible = (order[None, :] <= order[:, None]) & (document[:, :, None] == document[:, None, :])  # [B, S, S]
    if window is not None:
        visible &= order[:, None] - order[None, :] < window
    result = []
    for head in range(heads):
        scores = q[:, :, head] @ k[:, :, head // group].transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].expand(rows, tokens, 1)], -1)
        weights = scores.softmax(-1)[:, :, :tokens]
        result.append(weights @ v[:, :, head // group])
    return torch.stack(result, 2)


def relative(found: Tensor, true: Tensor, whole: Tensor | None = None) -> float:
    """Return the largest error relative to the largest true value; infinite where something is not a number.

    Values are taken to be of order one: where the truth is zero, the error is absolute.

    Args:
        whole: what the largest true value is taken from, if `true` is a part of it.
    """
    if found.shape != true.shape or found.dtype != true.dtype:
        return float("inf")
    if not true.numel():
        return 0.0
    largest = (true if whole is None else whole).abs().max().clamp(min=1e-4)
    error = float((found - true).abs().max() / largest)
    return error if error == error else float("inf")


def apart(found: float, true: float) -> float:
    """Return the relative error of a number."""
    error = abs(found - true) / max(abs(true), 1e-4)
    return error if error == error else float("inf")

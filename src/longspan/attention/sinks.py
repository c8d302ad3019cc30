"""Attention sinks: a score per head that takes its share of the softmax and has no value.

They are no business of kernels. Given the output and log-sum-exp of a complete attention, a sink only shrinks the
output and raises the log-sum-exp; kernels whose backward starts from these then return exact gradients.

Source: GPT-OSS, whose `s_aux` they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.protocol import wide

_WIDE_NUMBERS = 1 << 26
"""Numbers of `out` that are widened at a time."""


def absorb_(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Let sinks take their share of a complete attention; `out` is changed in place.

    Args:
        out: [B, S, H, Dv]; lse: [B, H, S]: over all keys that the queries see.
        sinks: [H], of the same heads.

    Returns:
        The log-sum-exp [B, H, S] with the sinks.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    out.mul_(torch.exp(lse - total).transpose(1, 2).unsqueeze(-1))
    return total


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [H], added up over rows and tokens, in fp32 or wider.

    A sink has probability exp(sink - lse) and value 0, so its score's gradient is minus that times rowsum(dout * out).

    Args:
        dout, out: [B, S, H, Dv]; lse: [B, H, S]: with the sinks.

    Cost: a few heads at a time, so that no wide copy of all of `out` is made.
    """
    dtype = wide(out.dtype)
    group = max(1, _WIDE_NUMBERS // (out.numel() // out.shape[2]))
    parts = []
    for first in range(0, out.shape[2], group):
        heads = slice(first, first + group)
        delta = (dout[:, :, heads].to(dtype) * out[:, :, heads].to(dtype)).sum(-1)  # [B, S, heads]
        shares = torch.exp(sinks[heads, None].to(lse.dtype) - lse[:, heads])  # [B, heads, S]
        parts.append(-(shares * delta.transpose(1, 2)).sum((0, 2)))
    return torch.cat(parts)

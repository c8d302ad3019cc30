"""Attention sinks: a score per head that takes its share of the softmax and has no value.

They are no business of kernels. Given the output and log-sum-exp of a complete attention, a sink only shrinks the
output and raises the log-sum-exp; kernels whose backward starts from these then return exact gradients.

Source: GPT-OSS, whose `s_aux` they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.protocol import wide


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

    Cost: head by head, so that no wide copy of `out` is made.
    """
    dtype = wide(out.dtype)
    parts = []
    for head, sink in enumerate(sinks.to(lse.dtype)):
        delta = (dout[:, :, head].to(dtype) * out[:, :, head].to(dtype)).sum(-1)  # [B, S]
        parts.append(-(torch.exp(sink - lse[:, head]) * delta).sum())
    return torch.stack(parts)

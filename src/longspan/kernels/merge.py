"""The join of two partial attentions over different keys."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge another key block into `out` and `lse`, in place.

    out += sigmoid(block_lse - lse) * (block_out - out) and lse = log(exp(lse) + exp(block_lse)); neither overflows.

    Args:
        out: [B, Sq, H, Dv] and lse: [B, H, Sq], fp32 or wider, over the keys seen so far.
        block_out, block_lse: the same over further keys; block_out in any dtype.
    """
    share = torch.sigmoid(block_lse - lse).transpose(1, 2).unsqueeze(-1)  # [B, Sq, H, 1]
    out.lerp_(block_out.to(out.dtype), share)
    torch.logaddexp(lse, block_lse, out=lse)

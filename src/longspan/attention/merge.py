"""Accumulators of attention over several key blocks, in fp32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.merge import merge_
from longspan.kernels.protocol import wide
from longspan.mask import Work


class Merged:
    """Attention output over the key blocks seen so far, with its log-sum-exp.

    A token's first block is stored as it is, so one block that covers everything costs nothing.

    Args:
        shape: [B, S, H, Dv] of the output.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.out: Tensor | None = None  # [B, S, H, Dv]
        self.lse: Tensor | None = None  # [B, H, S]

    def take(self, work: Work, out: Tensor, lse: Tensor) -> None:
        """Take what a call gave: a causal one holds its queries' own keys and comes first, others are merged in."""
        (self._first if work.block.causal else self._add)(work.rows, work.q, out, lse)

    def _first(self, rows: slice, tokens: slice, out: Tensor, lse: Tensor) -> None:
        if self.out is None or self.lse is None:
            if out.shape == self.shape:
                self.out, self.lse = out, lse
                return
            self.out = out.new_empty(self.shape)
            self.lse = lse.new_empty(self.shape[0], self.shape[2], self.shape[1])
        self.out[rows, tokens] = out
        self.lse[rows, :, tokens] = lse

    def _add(self, rows: slice, tokens: slice, out: Tensor, lse: Tensor) -> None:
        assert self.out is not None and self.lse is not None
        self.out = self.out.to(wide(self.dtype))
        merge_(self.out[rows, tokens], self.lse[rows, :, tokens], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the output in the operands' dtype and the log-sum-exp."""
        assert self.out is not None and self.lse is not None
        return self.out.to(self.dtype), self.lse


class Sum:
    """Sum of gradients over key blocks or ring steps.

    A first part that covers everything is kept as it is until another arrives, so that one block costs nothing.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None
        self.owned = False

    def add(self, rows: slice, tokens: slice, part: Tensor) -> None:
        """Add a gradient of these rows and tokens."""
        if self.total is None and part.shape == self.like.shape:
            self.total = part
            return
        self._own()[rows, tokens] += part

    def value(self) -> Tensor:
        """Return the sum, in the dtype of the parts or wider."""
        return self._own() if self.total is None else self.total

    def wide(self) -> Tensor:
        """Return the sum in fp32 or wider, whatever the parts were: the dtype that every rank sends."""
        return self.value().to(wide(self.like.dtype))

    def _own(self) -> Tensor:
        if not self.owned:
            dtype = wide(self.like.dtype)
            start = self.total
            self.total = torch.zeros(self.like.shape, dtype=dtype, device=self.like.device)
            if start is not None:
                self.total += start
            self.owned = True
        assert self.total is not None
        return self.total

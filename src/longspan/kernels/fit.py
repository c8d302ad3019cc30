"""A kernel that only takes up the room of attention, to prove in seconds that a length fits."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.protocol import Kernel, Request, Score, wide
from longspan.mask import Block


class FitKernel:
    """Return tensors of the right shapes that hold zeros, after a few calls in each direction that are real.

    Backward takes the last tiles first, so the real calls are those that need the most memory.

    Args:
        kernel: what the real calls run.
        calls: how many of them, in forward and in backward.
    """

    def __init__(self, kernel: Kernel, calls: int) -> None:
        self.kernel, self.name = kernel, f"{kernel.name} (fit)"
        self.forwards, self.backwards = calls, calls

    def refuses(self, request: Request) -> str | None:
        """Answer as the real kernel does."""
        return self.kernel.refuses(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        if self.forwards > 0:
            self.forwards -= 1
            return self.kernel.forward(q, k, v, block, score)
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype), device=q.device)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv."""
        if self.backwards > 0:
            self.backwards -= 1
            return self.kernel.backward(dout, q, k, v, out, lse, block, score)
        return tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))  # type: ignore[return-value]

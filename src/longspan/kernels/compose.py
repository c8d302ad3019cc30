"""Kernels made from other kernels: equal head dims by padding, and a choice per call."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from longspan.kernels.protocol import Kernel, Request, Score, asked, check
from longspan.mask import Block


class EqualDims:
    """Lets a kernel that wants one head_dim serve values of another, by padding with zeros.

    Exact: zeros add nothing to q k^T, and the padded columns of out, dv, dq and dk are cut off.

    Cost: a padded copy of the narrower operands and compute as if all had the larger head_dim.
    """

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner
        self.name = inner.name

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        dim = max(request.head_dim, request.v_head_dim)
        return self.inner.refuses(replace(request, head_dim=dim, v_head_dim=dim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check(self, q, k, v, block, score)
        dim = max(q.shape[-1], v.shape[-1])
        out, lse = self.inner.forward(_pad(q, dim), _pad(k, dim), _pad(v, dim), block, score)
        return out[..., : v.shape[-1]].contiguous(), lse  # a copy, so that no padding outlives the call

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        check(self, q, k, v, block, score)
        dim = max(q.shape[-1], v.shape[-1])
        dq, dk, dv = self.inner.backward(
            _pad(dout, dim), _pad(q, dim), _pad(k, dim), _pad(v, dim), _pad(out, dim), lse, block, score
        )
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


class Either:
    """Two kernels: each call goes to the first if it can do it, else to the second.

    The choice depends on the call alone, so backward uses the kernel that forward used.
    """

    def __init__(self, first: Kernel, second: Kernel) -> None:
        self.first, self.second = first, second
        self.name = f"{first.name}+{second.name}"

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        return self.second.refuses(request) if self.first.refuses(request) else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        return self._of(q, k, v, block, score).forward(q, k, v, block, score)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        return self._of(q, k, v, block, score).backward(dout, q, k, v, out, lse, block, score)

    def _of(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> Kernel:
        return self.second if self.first.refuses(asked(q, k, v, block, score)) else self.first


def _pad(x: Tensor, dim: int) -> Tensor:
    return F.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x

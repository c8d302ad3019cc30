"""Attention written out: the slow twin that the other kernels are tested against."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from longspan.kernels.protocol import Request, Score, check, segments, wide
from longspan.mask import Block


class Reference:
    """Dense masked softmax in fp32, or fp64 for fp64 operands, on any device.

    Cost: O(Sq * Sk) memory per head, for each segment.
    """

    name = "reference"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this kernel cannot run on a device, or None: plain PyTorch runs on every device that is there."""
        absent = device.type == "cuda" and not torch.cuda.is_available()
        return "this process sees no CUDA device" if absent else None

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        if not request.dtype.is_floating_point:
            return f"it computes on floating-point tensors, not {request.dtype}"
        return self.missing(request.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check(self, q, k, v, block, score)
        rows, queries, heads = q.shape[:3]
        out = q.new_empty(rows, queries, heads, v.shape[-1])  # [B, Sq, H, Dv]
        lse = q.new_empty(rows, heads, queries, dtype=wide(q.dtype))  # [B, H, Sq]
        with _without_autocast(q.device):
            for at, keys in segments(block, queries, k.shape[1]):
                scores = _hide(_capped(_products(q[:, at], k[:, keys], score.scale), score), block)  # [B, K, G, Sq, Sk]
                mixed = torch.einsum("bkgqs,bskd->bqkgd", scores.softmax(-1), v[:, keys].to(scores.dtype))
                out[:, at] = mixed.flatten(2, 3)
                lse[:, :, at] = scores.logsumexp(-1).flatten(1, 2)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the gradients are fp32 or wider."""
        check(self, q, k, v, block, score)
        dtype, kv_heads = wide(q.dtype), k.shape[2]
        dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
        with _without_autocast(q.device):
            for at, keys in segments(block, q.shape[1], k.shape[1]):
                capped = _capped(_products(q[:, at], k[:, keys], score.scale), score)  # [B, K, G, Sq, Sk]
                weights = torch.exp(_hide(capped, block) - lse[:, :, at].unflatten(1, (kv_heads, -1)).unsqueeze(-1))
                grad, kept, queries = (x[:, at].to(dtype).unflatten(2, (kv_heads, -1)) for x in (dout, out, q))
                delta = (grad * kept).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)  # [B, K, G, Sq, 1]
                dscores = torch.einsum("bqkgd,bskd->bkgqs", grad, v[:, keys].to(dtype)) - delta
                dscores = dscores * weights * score.scale
                if score.softcap is not None:
                    dscores = dscores * (1 - (capped / score.softcap).square())  # the derivative of tanh
                dq[:, at] = torch.einsum("bkgqs,bskd->bqkgd", dscores, k[:, keys].to(dtype)).flatten(2, 3)
                dk[:, keys] = torch.einsum("bkgqs,bqkgd->bskd", dscores, queries)
                dv[:, keys] = torch.einsum("bkgqs,bqkgd->bskd", weights, grad)
        return dq, dk, dv


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Keep autocast, where the device has it, from running the products in its own type."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale * q k^T [B, K, H/K, Sq, Sk] in fp32 or wider."""
    grouped = q.to(wide(q.dtype)).unflatten(2, (k.shape[2], -1))  # [B, Sq, K, H/K, D]
    return torch.einsum("bqkgd,bskd->bkgqs", grouped, k.to(grouped.dtype)) * scale


def _capped(scores: Tensor, score: Score) -> Tensor:
    return scores if score.softcap is None else score.softcap * torch.tanh(scores / score.softcap)


def _hide(scores: Tensor, block: Block) -> Tensor:
    """Put -inf where a query does not see a key."""
    queries, keys = scores.shape[-2:]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    if block.causal:
        seen = seen.tril(keys - queries)
    if block.left is not None:
        seen = seen.triu(keys - queries - block.left)
    return scores.masked_fill(~seen, -torch.inf) if block.diagonal else scores

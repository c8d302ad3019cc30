"""Ulysses: exchange tokens for heads around an inner attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.comm.exchange import to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.kernels.protocol import wide
from longspan.mesh import Axis


@dataclass(frozen=True)
class Ulysses:
    """The head exchange of one attention call.

    q, k and v travel in one all-to-all. Query heads may be divided unevenly; a KV head that several ranks need is sent
    to each of them, and its gradients are added up in fp32 or wider.

    Source: Jacobs et al., DeepSpeed-Ulysses (2023); uneven and replicated heads are ours.
    """

    split: HeadSplit
    axis: Axis

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange q [B, s, H, D], k [B, s, K, D], v [B, s, K, Dv] for [B, s*u, heads of this rank, ...]."""
        query, key = self.split.query, self.split.key
        q, k, v = to_heads([q, k, v], [query, key, key], self.axis)
        return q, k, v

    def leave(self, out: Tensor) -> Tensor:
        """Exchange out [B, s*u, heads of this rank, Dv] for [B, s, H, Dv]."""
        return to_tokens([out], [self.split.query], self.axis)[0]

    def enter_gradient(self, dout: Tensor) -> Tensor:
        """Exchange dout [B, s, H, Dv] as `enter` does q."""
        return to_heads([dout], [self.split.query], self.axis)[0]

    def leave_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange dq, dk and dv back, adding up the gradients of replicated KV heads."""
        query, key = self.split.query, self.split.key
        dq, dk, dv = to_tokens([dq, dk, dv], [query, key, key], self.axis)
        return dq, self._join(dk), self._join(dv)

    def expand(self, kv: Tensor) -> Tensor:
        """Repeat KV heads, one per query head, where the query heads of this rank do not share them evenly."""
        used = self.split.expansion(self.axis.rank)
        return kv if used is None else kv[:, :, used]

    def contract(self, dkv: Tensor) -> Tensor:
        """Undo `expand` for a gradient."""
        used = self.split.expansion(self.axis.rank)
        return dkv if used is None else _gather_heads(dkv, used, len(self.split.key[self.axis.rank]))

    def _join(self, dkv: Tensor) -> Tensor:
        """Add up replicas: [B, s, sum of KV heads over ranks, D] -> [B, s, K, D]."""
        if dkv.shape[2] == self.split.kv_heads:
            return dkv
        return _gather_heads(dkv, list(self.split.replicas()), self.split.kv_heads)


def _gather_heads(dkv: Tensor, heads: list[int], count: int) -> Tensor:
    """Add heads of dkv [B, S, len(heads), D] that belong together, in fp32 or wider -> [B, S, count, D]."""
    total = torch.zeros(*dkv.shape[:2], count, dkv.shape[-1], dtype=wide(dkv.dtype), device=dkv.device)
    for position, head in enumerate(heads):
        total[:, :, head] += dkv[:, :, position]
    return total

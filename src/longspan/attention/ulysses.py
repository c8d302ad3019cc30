"""Ulysses: exchange tokens for heads around an inner attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.comm.exchange import Heads, to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.comm.pending import Pending
from longspan.kernels.protocol import wide
from longspan.layout import Piece
from longspan.mesh import Axis


@dataclass(frozen=True)
class Ulysses:
    """The head exchange of one attention call.

    q, k and v travel in one all-to-all. Query heads may be divided unevenly; a KV head that several ranks need is sent
    to each of them, and its gradients are added up in fp32 or wider.

    Args:
        parts: token ranges of a rank's shard that are interleaved with those of the other ranks; the exchange puts the
            row in order. Empty when ranks hold contiguous tokens.

    Source: Jacobs et al., DeepSpeed-Ulysses (2023); uneven, replicated and interleaved exchanges are ours.
    """

    split: HeadSplit
    axis: Axis
    parts: tuple[Piece, ...] = ()

    def enter(self, q: Tensor, k: Tensor, v: Tensor, borrow: bool = False) -> Pending[list[Tensor]]:
        """Exchange q [B, s, H, D], k [B, s, K, D], v [B, s, K, Dv] for [B, s*u, heads of this rank, ...].

        Args:
            borrow: as for `longspan.comm.exchange.to_heads`.
        """
        query, key = self.split.query, self.split.key
        return self._to_heads([q, k, v], [query, key, key], borrow)

    def enter_keys(self, k: Tensor, v: Tensor, borrow: bool = False) -> Pending[list[Tensor]]:
        """Exchange k and v alone, as `enter` does."""
        return self._to_heads([k, v], [self.split.key] * 2, borrow)

    def enter_queries(self, *tensors: Tensor, borrow: bool = False) -> Pending[list[Tensor]]:
        """Exchange tensors [B, s, H, ...] in one all-to-all as `enter` does q: q, out and dout of a backward."""
        return self._to_heads(tensors, [self.split.query] * len(tensors), borrow)

    def leave(self, out: Tensor) -> Pending[Tensor]:
        """Exchange out [B, s*u, heads of this rank, Dv] for [B, s, H, Dv]."""
        return self._to_tokens([out], [self.split.query]).then(lambda outs: outs[0])

    def leave_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Pending[tuple[Tensor, Tensor, Tensor]]:
        """Exchange dq, dk and dv back, adding up the gradients of replicated KV heads."""
        query, key = self.split.query, self.split.key
        back = self._to_tokens([dq, dk, dv], [query, key, key])
        return back.then(lambda parts: (parts[0], self._join(parts[1]), self._join(parts[2])))

    def _to_heads(self, tensors: Sequence[Tensor], heads: Heads, borrow: bool) -> Pending[list[Tensor]]:
        return to_heads(tensors, heads, self.axis, self.parts, borrow)

    def _to_tokens(self, tensors: Sequence[Tensor], heads: Heads) -> Pending[list[Tensor]]:
        return to_tokens(tensors, heads, self.axis, self.parts)

    def own(self, sinks: Tensor) -> Tensor:
        """Return those of this rank's query heads, of sinks [H] that every rank has."""
        heads = self.split.query[self.axis.rank]
        return sinks[heads.start : heads.stop]

    def share(self, d_sinks: Tensor) -> Tensor:
        """Return this rank's share [H] of a gradient, given that of its own heads: nothing for those of others."""
        heads = self.split.query[self.axis.rank]
        return F.pad(d_sinks, (heads.start, self.split.heads - heads.stop))

    def expand(self, kv: Tensor) -> Tensor:
        """Repeat KV heads, one per query head, where the query heads of this rank do not share them evenly."""
        used = self.split.expansion(self.axis.rank)
        if used is None:
            return kv
        return torch.stack([kv[:, :, i] for i in used], 2)  # an index tensor would be copied from the host each time

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

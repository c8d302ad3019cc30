"""Shapes, and their truth by plain autograd in fp64, for the tests of attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from longspan.kernels.protocol import Score
from longspan.mask import Block


@dataclass(frozen=True)
class Case:
    """One attention call: B rows, H query heads, K key heads, and a block."""

    block: Block
    queries: int
    keys: int
    rows: int = 1
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 8
    v_head_dim: int = 8
    strides: str = "contiguous"
    score: Score = field(default_factory=partial(Score, 0.3))

    def operands(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and dout in the strides that the case asks for."""
        made = torch.Generator().manual_seed(seed)
        sizes = (
            (self.queries, self.heads, self.head_dim),
            (self.keys, self.kv_heads, self.head_dim),
            (self.keys, self.kv_heads, self.v_head_dim),
            (self.queries, self.heads, self.v_head_dim),
        )
        q, k, v, dout = (
            self._strided(torch.randn(self.rows, *size, generator=made, dtype=torch.float64).to(dtype))
            for size in sizes
        )
        return q, k, v, dout.mean(-1, keepdim=True).expand_as(dout) if self.strides == "expanded" else dout

    def _strided(self, x: Tensor) -> Tensor:
        if self.strides == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.strides == "fused":
            wider = torch.full((x.shape[0], x.shape[1] + 2, x.shape[2] + 3, x.shape[3]), torch.nan, dtype=x.dtype)
            wider[:, 1:-1, 2:-1] = x
            return wider[:, 1:-1, 2:-1]
        return x

    def truth(self, operands: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        """Return out, lse, dq, dk and dv by autograd through a masked softmax."""
        q, k, v, dout = (x.detach().double().requires_grad_() for x in operands)
        group = self.heads // self.kv_heads
        scores = torch.einsum("bqhd,bshd->bhqs", q, k.repeat_interleave(group, 2)) * self.score.scale
        if self.score.softcap is not None:
            scores = self.score.softcap * torch.tanh(scores / self.score.softcap)
        scores = torch.where(self._visible(), scores, -torch.inf)
        out = torch.einsum("bhqs,bshd->bqhd", torch.softmax(scores, -1), v.repeat_interleave(group, 2))
        grads = torch.autograd.grad(out, (q, k, v), dout.detach())
        found = {"out": out, "lse": torch.logsumexp(scores, -1)}
        return {name: x.detach() for name, x in (found | dict(zip(("dq", "dk", "dv"), grads, strict=True))).items()}

    def _visible(self) -> Tensor:
        """Return [Sq, Sk]: which keys each query sees, one pair at a time."""
        seen = torch.zeros(self.queries, self.keys, dtype=torch.bool)
        cu_q, cu_k = self.block.cu_q or (0, self.queries), self.block.cu_k or (0, self.keys)
        for (qa, qb), (ka, kb) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
            for i in range(qa, qb):
                last = kb - (qb - i) + 1 if self.block.causal else kb
                diagonal = kb - (qb - i)
                first = ka if self.block.left is None else max(ka, diagonal - self.block.left)
                seen[i, first:last] = True
        return seen


def packed(causal: bool, q: tuple[int, ...], k: tuple[int, ...] | None = None, left: int | None = None) -> Block:
    """Return a block of segments with these lengths."""
    cu = [tuple(torch.tensor((0, *lengths)).cumsum(0).tolist()) for lengths in (q, k or q)]
    return Block(causal, cu[0], cu[1], left)


CASES = {
    "causal": Case(Block(True), 7, 7, rows=2, heads=3),
    "causal, grouped, 63 tokens": Case(Block(True), 63, 63),
    "causal, more keys": Case(Block(True), 5, 13, rows=2),
    "causal, one query": Case(Block(True), 1, 9),
    "causal, one token": Case(Block(True), 1, 1),
    "causal, several key tiles": Case(Block(True), 530, 1061, heads=2, kv_heads=1, head_dim=4, v_head_dim=4),
    "full": Case(Block(False), 9, 4, rows=2),
    "full, more keys": Case(Block(False), 4, 11, heads=6, kv_heads=1),
    "narrow values": Case(Block(True), 6, 9, head_dim=10, v_head_dim=6),
    "broad values": Case(Block(True), 9, 9, head_dim=6, v_head_dim=10),
    "packed": Case(packed(True, (1, 5, 1, 1, 12)), 20, 20),
    "packed, more keys": Case(packed(True, (1, 4, 1, 3), (4, 4, 1, 11)), 9, 20),
    "packed, full": Case(packed(False, (1, 4, 2), (4, 1, 3)), 7, 8),
    "packed, one segment": Case(packed(True, (7,)), 7, 7),
    "packed, narrow values": Case(packed(True, (3, 1), (5, 1)), 4, 6, head_dim=16, v_head_dim=8),
    "transposed": Case(Block(True), 5, 13, rows=2, strides="transposed"),
    "fused": Case(Block(True), 5, 13, rows=2, strides="fused"),
    "expanded gradient": Case(Block(True), 5, 5, rows=2, strides="expanded"),
    "packed, fused": Case(packed(True, (1, 5, 3)), 9, 9, strides="fused"),
    "window": Case(Block(True, left=4), 63, 63, rows=2),
    "window of one": Case(Block(True, left=0), 9, 9),
    "window, more keys": Case(Block(True, left=3), 5, 13, rows=2),
    "window, several chunks": Case(Block(True, left=150), 300, 411, heads=2, kv_heads=1, head_dim=4, v_head_dim=4),
    "window, wider than the keys": Case(Block(True, left=20), 9, 9),
    "window, no order": Case(Block(False, left=4), 5, 9, rows=2),
    "window, no order, square": Case(Block(False, left=0), 260, 260, heads=2, kv_heads=2),
    "window, packed": Case(packed(True, (1, 5, 1, 1, 12), left=3), 20, 20),
    "window, packed, more keys": Case(packed(True, (1, 4, 1, 3), (4, 4, 1, 11), left=2), 9, 20),
    "window, packed, no order": Case(packed(False, (2, 4), (5, 6), left=3), 6, 11),
    "window, narrow values": Case(Block(True, left=2), 6, 9, head_dim=10, v_head_dim=6),
    "window, fused": Case(Block(True, left=2), 5, 13, rows=2, strides="fused"),
}


CAPPED = {
    f"softcap, {name}": replace(CASES[name], score=Score(0.9, 1.5))
    for name in (
        "causal, grouped, 63 tokens",
        "full",
        "packed, more keys",
        "window",
        "window, no order",
        "narrow values",
    )
}
"""For kernels that cap scores; the caps are so tight that most scores feel them."""


def relative_error(found: Tensor, true: Tensor) -> float:
    """Return the largest error beside the largest value, NaN counting as infinite."""
    error = (found.double() - true).abs().max() / true.abs().max().clamp_min(1e-3)
    return float(error.nan_to_num(torch.inf))

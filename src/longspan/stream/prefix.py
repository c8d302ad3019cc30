"""Attention of a layer that runs tile by tile: each tile against the keys before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.merge import Merged, Sum
from longspan.attention.ulysses import Ulysses
from longspan.kernels.protocol import Kernel, Score, wide
from longspan.layout import Piece
from longspan.mask import Mask, Work
from longspan.plan.tiles import KEY_BLOCK_TOKENS


@dataclass(frozen=True)
class Tiles:
    """The tiles of a shard, in order: tokens of this rank, tokens of the row that an exchange makes of them, and the
    kernel calls of these against their prefix.

    Args:
        works: for each tile, its calls; each query's own key is in one that comes before all its others.
    """

    local: tuple[Piece, ...]
    joined: tuple[Piece, ...]
    works: tuple[tuple[Work, ...], ...]

    @classmethod
    def of(cls, mask: Mask, local: Sequence[Piece], ranks: int) -> Tiles:
        """Work out the tiles of a shard that `ranks` Ulysses ranks hold interleaved. Pure."""
        joined = tuple(Piece(tile.start * ranks, tile.stop * ranks) for tile in local)
        works = tuple(mask.work([tile], [tile] if tile.start == 0 else [Piece(0, tile.start), tile]) for tile in joined)
        return cls(
            tuple(local),
            joined,
            tuple(tuple(b for work in tile for b in work.blocks(KEY_BLOCK_TOKENS)) for tile in works),
        )


class Prefix:
    """Keys and values of one layer, filled tile by tile, with their gradients in backward.

    Every tile attends to what its documents hold up to its own end, so only the keys and values of one layer exist at
    full length: 2 * K/u heads per token, and the same in fp32 for their gradients. Backward takes the tiles in
    descending order; a tile's own dk and dv are final after its turn, since later tiles came before.

    Args:
        length: tokens per row, padding included.
    """

    def __init__(self, ulysses: Ulysses, kernel: Kernel, tiles: Tiles, length: int) -> None:
        self.ulysses, self.kernel, self.tiles, self.length = ulysses, kernel, tiles, length
        self.k: Tensor | None = None  # [B, S, K of this rank, D]
        self.v: Tensor | None = None
        self.dk: Tensor | None = None
        self.dv: Tensor | None = None

    def append(self, index: int, k: Tensor, v: Tensor) -> None:
        """Store a tile's keys and values [B, T, K of this rank, ...], already exchanged."""
        at = self.tiles.joined[index]
        if self.k is None or self.v is None:
            self.k = k.new_empty(k.shape[0], self.length, *k.shape[2:])
            self.v = v.new_empty(v.shape[0], self.length, *v.shape[2:])
        self.k[:, at.start : at.stop] = k
        self.v[:, at.start : at.stop] = v

    def keys_values(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, S, K of this rank, ...]."""
        assert self.k is not None and self.v is not None
        return self.k, self.v

    def forward(self, index: int, q: Tensor, score: Score) -> tuple[Tensor, Tensor]:
        """Attend from a tile's queries [B, T, H of this rank, D] to its prefix -> out, lse [B, H, T]."""
        assert self.k is not None and self.v is not None
        merged = Merged(q.shape[:-1] + self.v.shape[-1:], q.dtype)
        for work in self.tiles.works[index]:
            k, v = self.ulysses.expand(self.k[work.rows, work.k]), self.ulysses.expand(self.v[work.rows, work.k])
            part = self.kernel.forward(q[work.rows, work.q], k, v, work.block, score)
            merged.take(work, *part)
        return merged.result()

    def backward(
        self, index: int, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a tile's dq and its final dk and dv, adding those of its prefix to what earlier tiles will return."""
        assert self.k is not None and self.v is not None
        if self.dk is None or self.dv is None:
            self.dk, self.dv = (torch.zeros_like(t, dtype=wide(t.dtype)) for t in (self.k, self.v))
        dq = Sum(q)
        for work in self.tiles.works[index]:
            rows, tokens = work.rows, work.q
            k, v = self.ulysses.expand(self.k[rows, work.k]), self.ulysses.expand(self.v[rows, work.k])
            args = (dout[rows, tokens], q[rows, tokens], k, v, out[rows, tokens], lse[rows, :, tokens])
            part_q, part_k, part_v = self.kernel.backward(*args, work.block, score)
            dq.add(rows, tokens, part_q)
            self.dk[rows, work.k] += self.ulysses.contract(part_k)
            self.dv[rows, work.k] += self.ulysses.contract(part_v)
        own = self.tiles.joined[index]
        return dq.value(), self.dk[:, own.start : own.stop], self.dv[:, own.start : own.stop]

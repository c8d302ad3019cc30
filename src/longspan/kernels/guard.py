"""Keeps every tensor that a kernel sees below the reach of a 32-bit index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.kernels.merge import merge_
from longspan.kernels.protocol import Kernel, Request, Score, check, wide
from longspan.mask import Block

INT32_ELEMENTS = 2**31
"""First element count that a signed 32-bit index cannot reach. Source: flash-attention issues 767 and 2611 (silent
wrap-around), and an illegal memory access in PyTorch's flash attention backward above it."""


@dataclass(frozen=True)
class Tile:
    """One slice of the output and the key blocks that it takes: (key tokens, causal)."""

    rows: slice
    heads: slice
    kv_heads: slice
    q: slice
    keys: tuple[tuple[slice, bool], ...]


class Guard:
    """Splits calls whose operands have `limit` elements or more, exactly.

    Rows are split first, then groups of query heads that share a key head, then heads of a group; what is still too
    large, one head of one row, is split over query and key tokens and merged by log-sum-exp. Keys count once per query
    head, because kernels expand them in backward, and head_dim counts rounded up as their fp32 buffers have it. An
    operand that is a view far apart in memory is copied, because kernels index with its strides.

    Args:
        inner: the kernel to protect.
        limit: elements that no operand may reach.

    Cost: nothing below the limit. Above it, copies of the slices; they are small beside the attention they feed.
    """

    def __init__(self, inner: Kernel, limit: int = INT32_ELEMENTS) -> None:
        self.inner = inner
        self.name = inner.name
        self.limit = limit

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        return self.inner.refuses(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`.

        Raises:
            KernelError: one head of a packed call, or of one with a window, is already too large.
        """
        check(self, q, k, v, block, score)
        near = self._near
        tiles = cut(q.shape, k.shape, v.shape[-1], block, self.limit)
        if len(tiles) == 1 and len(tiles[0].keys) == 1:
            return self.inner.forward(near(q), near(k), near(v), block, score)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])  # [B, Sq, H, Dv]
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype))  # [B, H, Sq]
        for tile in tiles:
            part, part_lse = self._tile(tile, q, k, v, block, score)
            out[tile.rows, tile.q, tile.heads] = part
            lse[tile.rows, tile.heads, tile.q] = part_lse
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; gradients summed over tiles are fp32 or wider."""
        check(self, q, k, v, block, score)
        near = self._near
        tiles = cut(q.shape, k.shape, v.shape[-1], block, self.limit)
        if len(tiles) == 1 and len(tiles[0].keys) == 1:
            return self.inner.backward(near(dout), near(q), near(k), near(v), near(out), near(lse), block, score)
        dtype = wide(q.dtype)
        disjoint = len({(tile.rows.start, tile.kv_heads.start) for tile in tiles}) == len(tiles)
        dq = torch.zeros(q.shape, dtype=dtype if len(tiles[-1].keys) > 1 else q.dtype, device=q.device)
        dk, dv = (torch.zeros(x.shape, dtype=k.dtype if disjoint else dtype, device=k.device) for x in (k, v))
        for tile in tiles:
            at = (tile.rows, tile.q, tile.heads)
            final = (near(out[at]), near(lse[tile.rows, tile.heads, tile.q]))
            for keys, causal in tile.keys:
                at_k = (tile.rows, keys, tile.kv_heads)
                part_q, part_k, part_v = self.inner.backward(
                    near(dout[at]), near(q[at]), near(k[at_k]), near(v[at_k]), *final, _block(block, causal), score
                )
                dq[at] += part_q
                dk[at_k] += part_k
                dv[at_k] += part_v
        return dq, dk, dv

    def _tile(self, tile: Tile, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """Return a tile's out and lse over all its key blocks."""
        near_q = self._near(q[tile.rows, tile.q, tile.heads])
        parts = (
            self.inner.forward(
                near_q,
                self._near(k[tile.rows, keys, tile.kv_heads]),
                self._near(v[tile.rows, keys, tile.kv_heads]),
                _block(block, causal),
                score,
            )
            for keys, causal in tile.keys
        )
        out, lse = next(parts)
        if len(tile.keys) > 1:
            out = out.to(wide(out.dtype))
        for part in parts:
            merge_(out, lse, *part)
        return out, lse

    def _near(self, x: Tensor) -> Tensor:
        """Copy an operand whose strides reach too far."""
        return x if extent(x) < self.limit else x.contiguous()


def cut(q: torch.Size, k: torch.Size, v_head_dim: int, block: Block, limit: int) -> tuple[Tile, ...]:
    """Divide a call into tiles whose operands stay below `limit` elements.

    Args:
        q: [B, Sq, H, D]; k: [B, Sk, K, D].

    Returns:
        Tiles that cover the output once; one tile with one block of keys if nothing needs dividing.

    Raises:
        KernelError: a packed call, or one with a window, of which one head is too large.
    """
    rows, queries, heads, head_dim = q
    keys, group = k[1], heads // k[2]
    budget = (limit - 1) // _rounded(max(head_dim, v_head_dim))  # tokens of one head
    fit = budget // max(queries, keys)  # rows x heads of all tokens
    whole_q = slice(0, queries)
    whole_k = ((slice(0, keys), block.causal),)
    if fit >= heads:
        step = min(fit // heads, rows)
        return tuple(
            Tile(slice(a, min(a + step, rows)), slice(0, heads), slice(0, k[2]), whole_q, whole_k)
            for a in range(0, rows, step)
        )
    step = max(fit, 1) if fit < group else fit // group * group
    if fit >= 1:
        spans = [(whole_q, whole_k)]
    elif block.varlen or block.left is not None or budget < 1:
        whole = "packed documents" if block.varlen else "windows" if block.left is not None else ""
        raise KernelError(
            f"One head of this call has {max(queries, keys)} tokens x head_dim {max(head_dim, v_head_dim)}, more than "
            f"the {limit} elements a kernel can index{whole and f', and {whole} cannot be cut'}. Use a "
            f"higher sequence-parallel degree or shorter rows."
        )
    else:
        spans = list(_token_spans(queries, keys, block.causal, budget))
    return tuple(
        Tile(slice(row, row + 1), slice(a, b), slice(a // group, (b - 1) // group + 1), *span)
        for row in range(rows)
        for a, b in _head_spans(heads, group, step)
        for span in spans
    )


def extent(x: Tensor) -> int:
    """Return the span of a view in its storage, in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _head_spans(heads: int, group: int, step: int) -> Iterator[tuple[int, int]]:
    """Divide query heads into spans of `step`: whole groups, or parts of one group each."""
    for start in range(0, heads, max(step, group)):
        stop = min(start + max(step, group), heads)
        for a in range(start, stop, step):
            yield a, min(a + step, stop)


def _token_spans(
    queries: int, keys: int, causal: bool, budget: int
) -> Iterator[tuple[slice, tuple[tuple[slice, bool], ...]]]:
    """Divide a dense call of one head into query tiles, each with its key blocks.

    A causal tile sees the keys before its own without a mask, and its own through a square causal block.
    """
    ahead = keys - queries  # keys before the first query's own
    for a in range(0, queries, budget):
        b = min(a + budget, queries)
        seen = a + ahead if causal else keys
        blocks = [(slice(c, min(c + budget, seen)), False) for c in range(0, seen, budget)]
        if causal:
            blocks.append((slice(a + ahead, b + ahead), True))
        yield slice(a, b), tuple(blocks)


def _block(block: Block, causal: bool) -> Block:
    return block if block.causal == causal else Block(causal)


def _rounded(head_dim: int) -> int:
    """Round a head_dim up as kernels do in their fp32 buffers.

    Source: `mha_bwd` in flash-attention 2: multiples of 32 up to 128, of 64 above.
    """
    step = 32 if head_dim <= 128 else 64
    return -(-head_dim // step) * step

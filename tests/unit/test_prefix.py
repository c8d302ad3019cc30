"""Keys in blocks: every visible pair once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longspan.layout import Piece
from longspan.mask import Block, Mask, Work
from longspan.stream.prefix import Tiles, blocks


def pairs(work: Work) -> list[tuple[int, int]]:
    """List which query of the tensors at hand sees which key."""
    queries, keys = work.q.stop - work.q.start, work.k.stop - work.k.start
    seen = []
    for q in range(queries):
        last = q + keys - queries if work.block.causal else keys - 1
        seen += [(work.q.start + q, work.k.start + k) for k in range(last + 1)]
    return seen


@given(st.integers(1, 20), st.integers(0, 60), st.integers(1, 30), st.integers(0, 9), st.booleans())
def test_blocks_cover_each_pair_once(queries: int, before: int, limit: int, at: int, causal: bool) -> None:
    work = Work(slice(None), slice(0, queries), slice(at, at + before + queries), Block(causal))
    found = blocks(work, limit)
    assert sorted(pair for part in found for pair in pairs(part)) == sorted(pairs(work))
    assert all(part.k.stop - part.k.start <= max(limit, queries) for part in found)
    assert all(part.q == work.q for part in found)


def test_calls_over_many_documents_stay_whole() -> None:
    mask = Mask(12, ((0, 4, 8),))
    tiles = Tiles.of(mask, [Piece(0, 12)], 1)
    (calls,) = tiles.works[0]
    assert [work.block.varlen for work in calls] == [True]
    assert blocks(calls[0], 2) == calls

"""Keys in blocks: every visible pair once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longspan.layout import Piece
from longspan.mask import Block, Mask, Work
from longspan.stream.prefix import Tiles


def pairs(work: Work) -> list[tuple[int, int]]:
    """List which query of the tensors at hand sees which key."""
    queries, keys, block = work.q.stop - work.q.start, work.k.stop - work.k.start, work.block
    seen = []
    for q in range(queries):
        diagonal = q + keys - queries
        first = 0 if block.left is None else max(0, diagonal - block.left)
        last = diagonal if block.causal else keys - 1
        assert first <= last, "a query that sees no key"
        seen += [(work.q.start + q, work.k.start + k) for k in range(first, last + 1)]
    return seen


@given(
    st.integers(1, 20), st.integers(0, 60), st.integers(1, 30), st.integers(0, 9), st.none() | st.integers(0, 90)
)  # fmt: skip
def test_blocks_cover_each_pair_once(queries: int, before: int, limit: int, at: int, left: int | None) -> None:
    work = Work(slice(None), slice(3, 3 + queries), slice(at, at + before + queries), Block(True, left=left))
    found = work.blocks(limit)
    assert sorted(pair for part in found for pair in pairs(part)) == sorted(pairs(work))
    assert all(part.k.stop - part.k.start <= max(limit, queries) for part in found)
    assert [part.block.causal for part in found] == [True] + [False] * (len(found) - 1)
    assert found[0].q == work.q


def test_calls_over_many_documents_stay_whole() -> None:
    mask = Mask(12, ((0, 4, 8),))
    tiles = Tiles.of(mask, [Piece(0, 12)], 1)
    (call,) = tiles.works[0]
    assert call.block.varlen
    assert call.blocks(2) == (call,)

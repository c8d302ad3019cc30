"""Layouts: every token has one owner, shares are equal, and what a rank holds is what the exchanges expect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import TopologyError
from longspan.layout import Layout, Piece, Segment

few = settings(max_examples=50, deadline=None)
layouts = st.builds(
    Layout,
    tokens=st.integers(1, 200),
    ring=st.integers(1, 5),
    ulysses=st.integers(1, 5),
    tile=st.none() | st.integers(1, 17),
    zigzag=st.booleans(),
)


@few
@given(layouts)
def test_every_token_is_on_exactly_one_rank(layout: Layout) -> None:
    held = [i for rank in range(layout.size) for i in layout.indices(rank)]
    assert sorted(held) == list(range(layout.length))


@few
@given(layouts)
def test_shares_are_equal_and_ascending(layout: Layout) -> None:
    for rank in range(layout.size):
        indices = layout.indices(rank)
        assert len(indices) == layout.shard_tokens
        assert indices == sorted(indices)
        assert all(len(piece) > 0 for piece in layout.pieces(rank))


@few
@given(layouts)
def test_padding_is_less_than_two_tokens_per_rank(layout: Layout) -> None:
    padding = layout.length - layout.tokens
    assert 0 <= padding < (2 * layout.size if layout.ring > 1 and layout.zigzag else layout.size)


@few
@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 4))
def test_zigzag_balances_causal_work_exactly(tokens: int, ring: int, ulysses: int) -> None:
    layout = Layout(tokens, ring, ulysses)
    area = [
        sum(key + 1 for piece in layout.ring_pieces(i) for key in range(piece.start, piece.stop)) for i in range(ring)
    ]
    assert len(set(area)) == 1


@few
@given(layouts)
def test_ranks_of_a_ring_position_join_to_its_pieces_in_rank_order(layout: Layout) -> None:
    """What the Ulysses all-to-all lays one after the other must be what the mask believes is there."""
    for i in range(layout.ring):
        pieces = layout.ring_pieces(i)
        whole = [t for piece in pieces for t in range(piece.start, piece.stop)]
        ranks = [layout.indices(i * layout.ulysses + j) for j in range(layout.ulysses)]
        if layout.tile is None:
            assert [t for held in ranks for t in held] == whole
        else:
            assert sorted(t for held in ranks for t in held) == whole


@few
@given(st.integers(1, 200), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))
def test_one_tile_of_all_ulysses_ranks_is_a_contiguous_run_of_what_they_hold(
    tokens: int, ring: int, ulysses: int, tile: int
) -> None:
    layout = Layout(tokens, ring, ulysses, tile)
    for i in range(ring):
        whole = [t for piece in layout.ring_pieces(i) for t in range(piece.start, piece.stop)]
        ranks = [layout.indices(i * ulysses + j) for j in range(ulysses)]
        joined: list[int] = []
        for start in range(0, layout.shard_tokens, tile):
            joined += [t for held in ranks for t in held[start : start + tile]]
        assert joined == whole  # tile after tile, in order: each a contiguous range, cut once at the zigzag's gap


@few
@given(layouts, st.data())
def test_segments_name_each_token_by_its_document(layout: Layout, data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, layout.length - 1)) if layout.length > 1 else st.just(set()))
    starts = [0, *sorted(inner)]
    for rank in range(layout.size):
        told = [starts[s.document] + t for s in layout.segments(rank, starts) for t in range(s.start, s.stop)]
        assert told == layout.indices(rank)
    bounds = [*starts, layout.length]
    for segment in (s for rank in range(layout.size) for s in layout.segments(rank, starts)):
        assert 0 <= segment.start < segment.stop <= bounds[segment.document + 1] - bounds[segment.document]


def test_a_known_layout() -> None:
    layout = Layout(tokens=13, ring=2, ulysses=2)
    assert (layout.length, layout.shard_tokens) == (16, 4)
    assert [layout.pieces(rank) for rank in range(4)] == [
        (Piece(0, 4),),
        (Piece(12, 16),),
        (Piece(4, 8),),
        (Piece(8, 12),),
    ]
    assert layout.segments(1, [0, 3, 14]) == (Segment(1, 9, 11), Segment(2, 0, 2))


def test_one_rank_holds_the_row_as_it_is() -> None:
    layout = Layout(7)
    assert (layout.length, layout.pieces(0)) == (7, (Piece(0, 7),))


@pytest.mark.parametrize("bad", [{"tokens": 0}, {"ring": 0}, {"ulysses": -1}, {"tile": 0}])
def test_senseless_numbers_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(TopologyError, match="at least one token"):
        Layout(**{"tokens": 8, **bad})

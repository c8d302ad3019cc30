"""Masks: the kernel calls of all ranks and steps cover each visible pair once, and no other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import mask as mask_module
from longspan.attention.schedule import Schedule
from longspan.errors import BatchError
from longspan.layout import Layout, Piece
from longspan.mask import Block, Mask, Work
from longspan.stream.prefix import Tiles


def visible(mask: Mask, rows: int) -> np.ndarray:
    """Say for each [row, query, key] whether the query sees the key, from the definition."""
    seen = np.zeros((rows, mask.length, mask.length), dtype=int)
    for row in range(rows):
        starts = mask.documents[row] if mask.documents else (0,)
        document = np.searchsorted(np.array(starts), np.arange(mask.length), side="right")
        seen[row] = np.tril(document[:, None] == document[None, :])
        if mask.window is not None:
            seen[row] = np.triu(seen[row], 1 - mask.window)
    return seen


def pairs(block: Block, queries: int, keys: int) -> np.ndarray:
    """Say which pairs of positions one kernel call computes, from the definition of a block."""
    seen = np.zeros((queries, keys), dtype=int)
    cu_q, cu_k = block.cu_q or (0, queries), block.cu_k or (0, keys)
    assert len(cu_q) == len(cu_k)
    assert (cu_q[0], cu_q[-1], cu_k[0], cu_k[-1]) == (0, queries, 0, keys)
    for (a, b), (c, d) in zip(zip(cu_q, cu_q[1:], strict=False), zip(cu_k, cu_k[1:], strict=False), strict=True):
        assert b > a
        assert d > c
        for i in range(b - a):
            last = i + (d - c) - (b - a) if block.causal else d - c - 1
            first = 0 if block.left is None else max(0, i + (d - c) - (b - a) - block.left)
            assert 0 <= first <= last, "a query sees no key"
            seen[a + i, c + first : c + last + 1] = 1
        assert not block.diagonal or b - a <= d - c, "kernels differ in what this means"
    return seen


def count(works: Sequence[Work], q: Sequence[Piece], k: Sequence[Piece], rows: int, length: int) -> np.ndarray:
    """Count how often the calls compute each [row, query, key] of the row."""
    q_tokens = np.array([t for piece in q for t in range(piece.start, piece.stop)])
    k_tokens = np.array([t for piece in k for t in range(piece.start, piece.stop)])
    done = np.zeros((rows, length, length), dtype=int)
    for work in works:
        at, keys = q_tokens[work.q], k_tokens[work.k]
        assert len(at)
        assert len(keys)
        if work.block.varlen:
            assert len(range(rows)[work.rows]) == 1
        for row in range(rows)[work.rows]:
            done[row][np.ix_(at, keys)] += pairs(work.block, len(at), len(keys))
    return done


@st.composite
def masks(draw: st.DrawFn, length: int, rows: int) -> Mask:
    window = draw(st.none() | st.integers(1, length + 1))
    if draw(st.booleans()):
        return Mask(length, window=window)
    inner = (
        st.sets(st.integers(1, length - 1), max_size=draw(st.sampled_from([2, length])))
        if length > 1
        else st.just(set())
    )
    return Mask(length, tuple((0, *sorted(draw(inner))) for _ in range(rows)), window)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 24), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.integers(1, 3), st.data())
def test_all_steps_of_all_ranks_cover_each_visible_pair_once(
    tokens: int, ring: int, ulysses: int, zigzag: bool, rows: int, data: st.DataObject
) -> None:
    layout = Layout(tokens, ring, ulysses, zigzag=zigzag)
    mask = data.draw(masks(layout.length, rows))
    total, worked = np.zeros((rows, layout.length, layout.length), dtype=int), [False] * ring
    for rank in range(ring):
        mine = layout.ring_pieces(rank)
        schedule = Schedule.of(mask, layout, rank)
        assert schedule.offsets[0] == 0
        assert schedule.offsets == Schedule.of(mask, layout, 0).offsets, "equal on all ranks"
        own_come_first([work for works in schedule.steps for work in works], rows, layout.length // ring)
        for offset, works in zip(schedule.offsets, schedule.steps, strict=True):
            worked[offset] |= bool(works)
            total += count(works, mine, layout.ring_pieces((rank - offset) % ring), rows, layout.length)
    np.testing.assert_array_equal(total, visible(mask, rows))
    assert [at for at, some in enumerate(worked) if some] == list(schedule.offsets), "no step without work on any rank"


def own_come_first(works: Sequence[Work], rows: int, queries: int) -> None:
    """Check that each query is in one causal call, before all its others."""
    covered = np.zeros((rows, queries), dtype=int)
    for work in works:
        if work.block.causal:
            covered[work.rows, work.q] += 1
        assert (covered[work.rows, work.q] == 1).all()
    assert (covered == 1).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 24), st.integers(1, 2), st.data())
def test_queries_against_all_keys_before_them(length: int, rows: int, data: st.DataObject) -> None:
    """One tile against its prefix, and any other choice of ranges that are equal or disjoint."""
    mask = data.draw(masks(length, rows))
    cuts = sorted({0, length, *data.draw(st.sets(st.integers(1, length - 1), max_size=5))})
    ranges = [Piece(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    q = [p for p in ranges if data.draw(st.booleans())] or [ranges[-1]]
    k = [p for p in ranges if data.draw(st.booleans())] or ranges
    wanted = visible(mask, rows)
    held_q, held_k = np.zeros(length, dtype=int), np.zeros(length, dtype=int)
    for piece in q:
        held_q[piece.start : piece.stop] = 1
    for piece in k:
        held_k[piece.start : piece.stop] = 1
    done = count(mask.work(q, k), q, k, rows, length)
    np.testing.assert_array_equal(done, wanted * held_q[None, :, None] * held_k[None, None, :])


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 24), st.integers(1, 2), st.integers(1, 9), st.data())
def test_tiles_cover_each_visible_pair_once(length: int, rows: int, step: int, data: st.DataObject) -> None:
    mask, row = data.draw(masks(length, rows)), [Piece(0, length)]
    tiles = Tiles.of(mask, [Piece(a, min(a + step, length)) for a in range(0, length, step)], 1)
    total = np.zeros((rows, length, length), dtype=int)
    for tile, works in zip(tiles.joined, tiles.works, strict=True):
        own_come_first(works, rows, len(tile))
        total += count(works, [tile], row, rows, length)
    np.testing.assert_array_equal(total, visible(mask, rows))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 24), st.integers(1, 2), st.data())
def test_a_window_as_long_as_every_document_is_none(length: int, rows: int, data: st.DataObject) -> None:
    mask, window = data.draw(masks(length, rows)), data.draw(st.none() | st.integers(1, length + 1))
    within = mask.within(window)
    wanted = visible(Mask(length, mask.documents, window), rows)
    np.testing.assert_array_equal(visible(within, rows), wanted)
    unbounded = (wanted == visible(Mask(length, mask.documents), rows)).all()
    assert (within.window is None) == unbounded
    works = within.work([Piece(0, length)], [Piece(0, length)])
    assert all(work.block.left is None for work in works) == unbounded


def test_a_window_on_a_zigzag_ring_needs_two_hops() -> None:
    """Piece 1 sees the end of piece 0, one rank back; the mirror pieces see the next rank's."""
    layout = Layout(64, ring=4)
    assert Schedule.of(Mask(64), layout, 0).offsets == (0, 1, 2, 3)
    assert Schedule.of(Mask(64, window=9), layout, 0).offsets == (0, 1, 3)
    assert Schedule.of(Mask(64, window=1), layout, 0).offsets == (0,)
    assert Schedule.of(Mask(64, (tuple(range(0, 64, 8)),)), layout, 0).offsets == (0,), "documents end with the pieces"


def test_a_window_costs_no_more_than_what_it_shows() -> None:
    """A query tile against a long prefix is given no keys that none of its queries sees."""
    (work,) = Mask(1000, window=50).work([Piece(900, 910)], [Piece(0, 900), Piece(900, 910)])
    assert (work.q, work.k, work.block) == (slice(0, 10), slice(851, 910), Block(True, left=49))
    far, near = Mask(1000, window=50).work([Piece(900, 1000)], [Piece(800, 900)])[0], None
    assert (far.q, far.k, far.block, near) == (slice(0, 49), slice(51, 100), Block(False, left=0), None)
    both = Mask(1000, window=500).work([Piece(300, 900)], [Piece(0, 200)])
    assert [(w.q, w.k, w.block) for w in both] == [
        (slice(0, 200), slice(0, 200), Block(False)),
        (slice(200, 399), slice(1, 200), Block(False, left=0)),
    ]


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_the_token_itself_is_refused(window: int) -> None:
    with pytest.raises(BatchError, match=f"at least the token itself, got {window} tokens"):
        Mask(8, window=window)


def test_a_whole_row_is_one_causal_call_for_all_rows() -> None:
    row = [Piece(0, 8)]
    (work,) = Mask(8).work(row, row)
    assert (work.rows, work.q, work.k, work.block) == (slice(None), slice(0, 8), slice(0, 8), Block(causal=True))


def test_a_pack_of_documents_is_one_varlen_call_per_row() -> None:
    row = [Piece(0, 8)]
    works = Mask(8, ((0, 3, 4), (0,))).work(row, row)
    assert [work.rows for work in works] == [slice(0, 1), slice(1, 2)]
    assert works[0].block == Block(True, (0, 3, 4, 8), (0, 3, 4, 8))
    assert (works[0].block.max_q, works[0].block.max_k) == (4, 4)
    assert works[1].block == Block(causal=True)


def test_zigzag_steps_are_the_two_classical_halves() -> None:
    layout = Layout(16, ring=2)
    first, second = (Schedule.of(Mask(16), layout, rank).steps[1] for rank in range(2))
    assert [(w.q, w.k, w.block.causal) for w in first] == [(slice(4, 8), slice(0, 8), False)]
    assert [(w.q, w.k, w.block.causal) for w in second] == [(slice(0, 8), slice(0, 4), False)]


def test_tiles_take_time_for_their_own_documents_only() -> None:
    """100,000 tokens, 5,000 documents, 64 tiles: a look at every document from every tile would be 320,000 looks."""
    length, tiles = 102400, 64
    starts = tuple(sorted({0, *np.random.default_rng(0).choice(length, 4999, replace=False).tolist()}))
    mask, step = Mask(length, (starts,)), length // tiles // 2
    seen = []
    real = mask_module._numbers

    def counted(*args: Any) -> list[int]:
        seen.append(list(real(*args)))
        return seen[-1]

    with patch.object(mask_module, "_numbers", counted):
        made = Tiles.of(mask, [Piece(a, a + step) for a in range(0, length // 2, step)], 2)
    assert len(made.works) == tiles
    assert len(starts) <= sum(map(len, seen)) <= len(starts) + tiles
    began = time.process_time()
    Tiles.of(mask, made.local, 2)
    assert time.process_time() - began < 0.5


def test_several_rows_of_one_document_each_share_a_call() -> None:
    assert not Mask(4, ((0,), (0,))).packed
    assert [w.rows for w in Mask(4, ((0,), (0,))).work([Piece(0, 4)], [Piece(0, 4)])] == [slice(None)]


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 3, 2), (0, 8), (0, -1)])
def test_starts_that_are_no_starts_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(BatchError, match="document starts"):
        Mask(8, (starts,))


def test_an_empty_row_is_refused() -> None:
    with pytest.raises(BatchError, match="at least one token"):
        Mask(0)


def test_mask_and_layout_must_have_one_length() -> None:
    with pytest.raises(BatchError, match="rows of 9 tokens, the layout 12"):
        Schedule.of(Mask(9), Layout(9, ring=3), 0)

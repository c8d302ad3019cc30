"""Degrees: a table, and what holds for all of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.comm.heads import HeadSplit
from longspan.errors import TopologyError
from longspan.plan.degrees import choose_degrees

TABLE = [
    # heads, KV heads, ranks, ranks per node -> ulysses, ring
    (32, 8, 1, None, 1, 1),
    (32, 8, 8, 8, 8, 1),
    (32, 8, 16, 8, 8, 2),
    (32, 8, 16, None, 16, 1),
    (32, 8, 64, None, 32, 2),
    (32, 8, 64, 8, 8, 8),
    (64, 8, 32, 8, 8, 4),
    (14, 2, 4, 8, 2, 2),
    (14, 2, 8, 8, 2, 4),
    (14, 2, 7, 8, 7, 1),
    (9, 3, 3, None, 3, 1),
    (9, 3, 4, None, 1, 4),
    (9, 3, 6, None, 3, 2),
    (9, 3, 9, None, 9, 1),
    (40, 8, 16, 8, 8, 2),
    (28, 4, 8, 8, 4, 2),
    (25, 5, 8, 8, 1, 8),
    (25, 5, 5, None, 5, 1),
    (5, 1, 2, None, 1, 2),
    (5, 1, 7, None, 1, 7),
    (7, 1, 7, None, 7, 1),
    (1, 1, 4, None, 1, 4),
    (2, 2, 8, None, 2, 4),
    (32, 8, 6, 4, 2, 3),
    (32, 8, 12, 8, 4, 3),
    (48, 8, 12, 8, 4, 3),
    (32, 8, 2, 1, 1, 2),
]


@pytest.mark.parametrize(("heads", "kv_heads", "size", "node", "ulysses", "ring"), TABLE)
def test_table(heads: int, kv_heads: int, size: int, node: int | None, ulysses: int, ring: int) -> None:
    chosen = choose_degrees(heads, kv_heads, size, node)
    assert (chosen.ulysses, chosen.ring) == (ulysses, ring)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 128), st.none() | st.integers(1, 16))
def test_every_choice_is_possible(kv_heads: int, group: int, size: int, node: int | None) -> None:
    heads = kv_heads * group
    chosen = choose_degrees(heads, kv_heads, size, node)
    assert chosen.size == size
    assert heads % chosen.ulysses == 0
    assert chosen.ulysses <= (node or size)
    assert choose_degrees(heads, kv_heads, size, node, ulysses=chosen.ulysses) == chosen
    assert choose_degrees(heads, kv_heads, size, node, ring=chosen.ring) == chosen


def test_reasons_name_what_is_uneven() -> None:
    assert choose_degrees(6, 3, 4, ulysses=4).reason == (
        "6 query heads over 4 ranks; unevenly, at most 2 each; 3 KV heads replicated where ranks share one; rows of "
        "many short documents would move less with ring_degree=4"
    )
    assert "zigzag ring of 2" in choose_degrees(32, 8, 16, 8).reason


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"size": 0}, "at least 1, got 0"),
        ({"size": 4, "ulysses": 3}, "got 3 and None for 4; degrees that work: 1x4, 2x2, 4x1"),
        ({"size": 4, "ring": 3}, "got None and 3 for 4"),
        ({"size": 4, "ulysses": 2, "ring": 4}, "got 2 and 4 for 4"),
        ({"size": 4, "ring": 8}, "got None and 8"),
        ({"size": 4, "ulysses": 8}, "got 8 and None"),
        ({"size": 4, "ulysses": 0}, "ulysses_degree=0"),
        ({"size": 4, "ring": -1}, "ring_degree=-1"),
        ({"size": 8, "ulysses": 8}, "the model has 6. Use ulysses_degree <= 6"),
    ],
)
def test_impossible_degrees_are_refused(given_: dict[str, int], told: str) -> None:
    with pytest.raises(TopologyError, match=told):
        choose_degrees(6, 3, **given_)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_heads_are_divided_in_order_and_bring_the_keys_they_use(kv_heads: int, group: int, data: st.DataObject) -> None:
    heads = kv_heads * group
    split = HeadSplit(heads, kv_heads, data.draw(st.integers(1, heads)))
    assert [h for part in split.query for h in part] == list(range(heads))
    sizes = [len(part) for part in split.query]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    for rank, (queries, keys) in enumerate(zip(split.query, split.key, strict=True)):
        needed = [h // group for h in queries]
        assert sorted(set(needed)) == list(keys)
        used = split.expansion(rank)
        if used is None:
            share = len(queries) // len(keys)
            assert [keys[i // share] for i in range(len(queries))] == needed
        else:
            assert [keys[i] for i in used] == needed
    assert sorted(set(split.replicas())) == list(range(kv_heads))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 4, 2), (2, 2, 3)])
def test_heads_that_cannot_be_divided_are_refused(heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(TopologyError, match="cannot share"):
        HeadSplit(heads, kv_heads, size)

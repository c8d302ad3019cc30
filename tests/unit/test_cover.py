"""Covers of matrices: every pair is tried, by fewer cells."""

from __future__ import annotations

from itertools import product

import pytest

from cover import cover, pairs


@pytest.mark.parametrize(
    ("sizes", "most"), [((4, 3, 2, 2), 14), ((2, 5, 4), 21), ((2, 2, 2), 5), ((3, 4), 12), ((7,), 7)]
)
def test_every_pair_is_tried(sizes: tuple[int, ...], most: int) -> None:
    cells = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]
    chosen = cover(cells)
    assert set().union(*(pairs(cells[i]) for i in chosen)) == set().union(*map(pairs, cells))
    assert 0 < len(chosen) <= most


def test_a_cell_that_adds_no_pair_is_left_out() -> None:
    cells = [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 1, "c": 1}, {"a": 1, "b": 0, "c": 1}, {"a": 0, "b": 0, "c": 1}]
    assert cover(cells) == [0, 1, 2]

"""Which cells of a test's matrix run: a cover of all pairs of its parameters, or all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, groupby
from typing import Any

Cell = Mapping[str, Any]
"""The value of each parameter."""


def pairs(cell: Cell) -> set[tuple[tuple[str, str], ...]]:
    """Return the pairs of values that a cell tries together."""
    return set(combinations(sorted((name, repr(value)) for name, value in cell.items()), 2))


def cover(cells: Sequence[Cell]) -> list[int]:
    """Return the numbers of cells that try every pair of values that some cell tries, each chosen as it adds most."""
    left = set().union(*map(pairs, cells))
    if not left:  # one parameter
        return list(range(len(cells)))
    chosen: list[int] = []
    while left:
        best = max(range(len(cells)), key=lambda i: (len(pairs(cells[i]) & left), -i))
        left -= pairs(cells[best])
        chosen.append(best)
    return sorted(chosen)


def beyond(items: Iterable[Any]) -> list[Any]:
    """Return the tests marked `matrix` that a cover of their function's cells leaves out."""
    marked = [item for item in items if item.get_closest_marker("matrix")]
    found: list[Any] = []
    for _, group in groupby(marked, key=lambda item: (item.path, item.originalname)):
        cells = list(group)
        kept = set(cover([item.callspec.params for item in cells]))
        found += [item for i, item in enumerate(cells) if i not in kept]
    return found

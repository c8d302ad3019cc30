"""Streamed layers against one device, in fp64: every kind of model, decision, exchange, tile, packing and engine."""

from __future__ import annotations

from itertools import combinations, cycle, product

import pytest

from longspan.keep import Keep, Memory
from pool import RunRanks
from steps import Case, all_errors

pytestmark = pytest.mark.dist

PRESETS = ("dense", "moe", "lora")
KEEPS = {
    "x+O+KV": Keep.X_O_KV,
    "x+O": Keep.X_O,
    "x": Keep.X,
    "graph, x": (Keep.GRAPH, Keep.X),
    "x, none": (Keep.X, Keep.NONE),
    "x+O, none": (Keep.X_O, Keep.NONE),
}
DEGREES = {"one": (1, 1), "u2": (2, 1), "r2": (1, 2), "u4": (4, 1), "2x2": (2, 2)}
TILES = (1, 3, 1000)
ENGINES = ("single", "ddp", "fsdp2")


def cases(preset: str, degrees: str) -> list[Case]:
    """Cover every decision; tiles, engines and packing go round so that every pair of values meets in some preset."""
    start = 5 * PRESETS.index(preset) + 7 * list(DEGREES).index(degrees)
    rest = list(product(TILES, ENGINES, ("plain", "packed")))
    turn = cycle(rest[(start + 4 * i) % len(rest)] for i in range(len(rest)))
    found = []
    for keep, (tile, engine, rows) in zip(KEEPS.values(), turn, strict=False):
        other = ", packed" if rows == "plain" else ", plain"
        batch = rows + other if degrees == "one" else rows
        found.append(Case(preset, DEGREES[degrees], Memory(tile, keep), engine, batch))
    return found


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_equal_one_device(run_ranks: RunRanks, preset: str, degrees: str) -> None:
    if preset == "lora":
        pytest.importorskip("peft")
    world = max(2, DEGREES[degrees][0] * DEGREES[degrees][1])
    for wrong in run_ranks(world, all_errors, cases(preset, degrees)):
        assert not wrong


def test_the_cases_cover_every_pair() -> None:
    everything = [case for preset, degrees in product(PRESETS, DEGREES) for case in cases(preset, degrees)]
    values = [
        (c.preset, c.degrees, c.memory.keep, c.memory.tile_tokens, c.engine, c.batch.split(",")[0]) for c in everything
    ]
    for i, j in combinations(range(6), 2):
        pairs = {(str(v[i]), str(v[j])) for v in values}
        assert len(pairs) == len({str(v[i]) for v in values}) * len({str(v[j]) for v in values}), (i, j)

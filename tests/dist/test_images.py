"""Models with a vision tower against one device: the loss and every gradient, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dense import TOLERANCE, apart, relative
from pictures import Album, Item, build, gradients, one_device
from pool import RunRanks

import longspan
from longspan.check.float64 import float64_throughout
from longspan.plan.keep import Keep, Memory

pytestmark = pytest.mark.dist

Errors = dict[str, float]

TEXT: Sequence[Sequence[Sequence[Item]]] = [[[17]]]
ONE: Sequence[Sequence[Sequence[Item]]] = [[[5, (2, 3), 8]]]
SEVERAL: Sequence[Sequence[Sequence[Item]]] = [[[3, (2, 3), 2, (4, 1), 1, (1, 1), 4, (3, 2, 2), 9]], [[(1, 2), 11]], [[8]]]
PACKED: Sequence[Sequence[Sequence[Item]]] = [[[4, (2, 2), 3], [6], [2, (1, 3), 1, (2, 2, 1), 5], [1]]]
MEMORIES = {
    "plain": Memory(),
    "streamed": Memory(3, Keep.X_O),
    "rebuilt": Memory(3, (Keep.X, Keep.NONE, Keep.NONE, Keep.NONE)),
    "replayed": Memory(4, (Keep.X_O, Keep.OUT, Keep.OUT, Keep.OUT)),
}
DEGREES = {"ulysses 2": (2, 1), "ring 2": (1, 2), "2 x 2": (2, 2), "ulysses 3": (3, 1), "ring 3": (1, 3)}


@dataclass(frozen=True)
class Case:
    """One step; a data rank has an album each."""

    albums: Sequence[Album]
    degrees: tuple[int, int]
    memory: Memory


def step_errors(case: Case) -> Errors:
    """Train one step, and return the relative errors of the loss and of each gradient."""
    with float64_throughout():
        model = build(case.albums[0].family)
        loss, wanted = one_device(model, case.albums)
        ulysses, ring = case.degrees
        handle = longspan.prepare(model, ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, memory=case.memory)
        out = model(**handle.shard(case.albums[handle.mesh.data.rank].batch()))
        out.loss.backward()
        handle.reduce_gradients()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    return {name: relative(found[name], wanted[name]) for name in wanted} | {"loss": apart(float(out.loss.detach()), loss)}


def wrong(results: Sequence[Errors]) -> dict[str, float]:
    worst = {name: max(errors[name] for errors in results) for name in results[0]}
    return {name: error for name, error in worst.items() if not error <= TOLERANCE}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_loss_and_gradients_equal_one_device(run_ranks: RunRanks, family: str, degrees: Any, memory: Memory) -> None:
    albums = [Album(family, rows) for rows in (TEXT, ONE, SEVERAL)] + [Album(family, PACKED, borders="cu_seqlens")]
    for album in albums:
        results = run_ranks(degrees[0] * degrees[1], step_errors, Case([album], degrees, memory))
        assert not wrong(results), (album, wrong(results))

"""Models with a vision tower against one device: the loss and every gradient, in fp64."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

import longspan
from dense import TOLERANCE, apart, relative
from longspan.check.float64 import float64_throughout
from longspan.engines import build_engine
from longspan.keep import Keep, Memory
from pictures import Album, Item, build, one_device
from pool import RunRanks

pytestmark = pytest.mark.dist

Rows = tuple[tuple[tuple[Item, ...], ...], ...]

TEXT: Rows = (((17,),),)
ONE: Rows = (((5, (2, 3), 8),),)
SEVERAL: Rows = (((3, (2, 3), 2, (4, 1), 1, (1, 1), 4, (3, 2, 2), 9),), ((((1, 2)), 11),), ((8,),))
PACKED: Rows = (((4, (2, 2), 3), (6,), (2, (1, 3), 1, (2, 2, 1), 5), (1,)),)
MEMORIES = {
    "plain": Memory(),
    "streamed": Memory(3, Keep.X_O),
    "rebuilt": Memory(3, (Keep.X, Keep.NONE, Keep.NONE, Keep.NONE)),
    "replayed": Memory(4, (Keep.X_O, Keep.OUT, Keep.OUT, Keep.OUT)),
}
DEGREES = {"ulysses 2": (2, 1), "ring 2": (1, 2), "2 x 2": (2, 2), "ulysses 3": (3, 1), "ring 3": (1, 3)}


@dataclass(frozen=True)
class Case:
    """Steps of an engine, each with an album per data rank."""

    steps: Sequence[Sequence[Album]]
    degrees: tuple[int, int]
    memory: Memory = field(default_factory=Memory)
    engine: str = "single"


@functools.cache
def truth(albums: tuple[Album, ...]) -> tuple[float, dict[str, Tensor]]:
    with float64_throughout():
        return one_device(build(albums[0].family), albums)


Found = list[tuple[float, dict[str, Tensor | None]]]


def train(case: Case) -> Found:
    """Return loss and gradients of each step, without stepping."""
    results: Found = []
    with float64_throughout():
        model = build(case.steps[0][0].family)
        ulysses, ring = case.degrees
        engine = build_engine(case.engine, ulysses * ring)
        handle = longspan.prepare(model, ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, memory=case.memory)
        module = engine.wrap(model, handle)
        for albums in case.steps:
            out = module(**handle.shard(albums[handle.mesh.data.rank].batch()))
            engine.backward(out.loss)
            engine.reduce()
            found = {name: engine.gradient(p) for name, p in model.named_parameters()}
            results.append((float(out.loss.detach()), {n: None if g is None else g.clone() for n, g in found.items()}))
            model.zero_grad()
    return results


def wrong(run_ranks: RunRanks, case: Case) -> dict[tuple[int, str], float]:
    """Run a case, and return what differs from one device, by step and name."""
    dp, found = len(case.steps[0]), {}
    for rank_results in run_ranks(dp * case.degrees[0] * case.degrees[1], train, case):
        for step, (albums, (loss, gradients)) in enumerate(zip(case.steps, rank_results, strict=True)):
            true_loss, wanted = truth(tuple(albums))
            assert gradients.keys() == wanted.keys()
            for name, true in wanted.items():
                gradient = gradients[name]
                error = math.inf if gradient is None else relative(gradient, true)
                found[step, name] = max(error, found.get((step, name), 0.0))
            found[step, "loss"] = max(apart(loss, true_loss), found.get((step, "loss"), 0.0))
    return {at: error for at, error in found.items() if not error <= TOLERANCE}


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("degrees", DEGREES.values(), ids=DEGREES)
@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_loss_and_gradients_equal_one_device(run_ranks: RunRanks, family: str, degrees: Any, memory: Memory) -> None:
    albums = [Album(family, rows) for rows in (TEXT, ONE, SEVERAL)] + [Album(family, PACKED, borders="cu_seqlens")]
    assert not wrong(run_ranks, Case([[album] for album in albums], degrees, memory))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp2"])
def test_data_ranks_with_and_without_images(run_ranks: RunRanks, family: str, engine: str) -> None:
    """In each step another data rank has images, or none, or images where the other has videos alone."""
    text, one, several = (Album(family, rows) for rows in (TEXT, ONE, SEVERAL))
    video = Album(family, (((4, (2, 1, 2), 7),),))
    case = Case([[one, text], [text, several], [text, text], [video, one]], (2, 1), MEMORIES["rebuilt"], engine)
    assert not wrong(run_ranks, case)

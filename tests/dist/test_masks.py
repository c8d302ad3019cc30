"""Windows, softcaps and sinks of transformers' models against one device, in fp64: every exchange and decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import longspan
import steps
from dense import apart
from longspan.attention import build as build_module
from longspan.attention.schedule import Schedule
from longspan.attention.ulysses import Ulysses
from longspan.batch import Shard
from longspan.check.float64 import float64_throughout
from longspan.keep import Keep, Memory
from longspan.kernels.protocol import Score
from longspan.layout import Layout
from longspan.stream.prefix import Tiles
from models import WINDOW, Rows, build
from pool import RunRanks
from test_parity import Errors, compare, exact, worst

pytestmark = pytest.mark.dist

FAMILIES = ["mistral-window", "qwen2-window", "gemma2", "gemma3", "granite-swa", "gpt-oss"]
ROWS = {"one document": Rows([[63]]), "packed": Rows([[20, 1, 6, 14]]), "ragged": Rows([[13, 4], [29], [1, 1, 8]])}
DEGREES = {"one": (1, 1), "u2": (2, 1), "r2": (1, 2), "2x2": (2, 2), "u3": (3, 1), "r3": (1, 3)}
FULL_TILE = 10**9
MEMORIES = {
    "graph": Memory(),
    "x+O+KV": Memory(5, Keep.X_O_KV),
    "x+O": Memory(3, Keep.X_O),
    "x": Memory(1000, Keep.X),
    "x, none": Memory(4, (Keep.X, Keep.NONE, Keep.NONE)),
    "x+O, O": Memory(4, (Keep.X_O, Keep.OUT, Keep.OUT)),
}
COMPILED = {
    "compiled": Memory(3, Keep.X_O, "eager"),
    "compiled, x+O+KV": Memory(4, Keep.X_O_KV, "eager"),
    "products": Memory(3, Keep.PRODUCTS, "eager"),
    "compiled graph": Memory(FULL_TILE, Keep.GRAPH, "eager"),
}


@dataclass(frozen=True)
class Case:
    """One step of a model, divided and run in one way."""

    family: str
    rows: str
    degrees: str
    memory: str = "graph"

    @property
    def ranks(self) -> int:
        ulysses, ring = DEGREES[self.degrees]
        return ulysses * ring

    def ways(self, layers: int) -> Memory:
        """Return how the layers run, for so many of them."""
        memory = (MEMORIES | COMPILED)[self.memory]
        if memory.tile_tokens == FULL_TILE:
            tokens, (ulysses, ring) = max(sum(row) for row in ROWS[self.rows].documents), DEGREES[self.degrees]
            return replace(memory, tile_tokens=Layout(tokens, ring, ulysses).shard_tokens)
        return replace(memory, keep=memory.keep[:layers]) if isinstance(memory.keep, tuple) else memory


def errors(case: Case, mistake: str | None = None) -> Errors:
    """Return the relative errors of the loss and of each gradient."""
    rows, (ulysses, ring) = ROWS[case.rows], DEGREES[case.degrees]
    with float64_throughout():
        model = build(case.family)
        truth = steps.truth_of(model, [[rows]])
        with MISTAKES[mistake]() if mistake else nullcontext():
            handle = longspan.prepare(
                model, case.ranks, ulysses_degree=ulysses, ring_degree=ring, memory=case.ways(len(model.model.layers))
            )
            out = model(**handle.shard(rows.batch()))
            out.loss.backward()
            handle.reduce_gradients()
    return compare(model, truth.gradients) | {"loss": apart(float(out.loss.detach()), truth.loss)}


def all_errors(cases: list[Case]) -> list[Errors]:
    return [errors(case) for case in cases]


def check(run_ranks: RunRanks, cases: list[Case]) -> None:
    """Run cases of the same degrees, and check each on all ranks."""
    results = run_ranks(cases[0].ranks, all_errors, cases, timeout_s=200)
    for case, found in zip(cases, zip(*results, strict=True), strict=True):
        assert exact(found), (case, worst(found))


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_one_device(run_ranks: RunRanks, family: str, degrees: str) -> None:
    """Three ranks share 4 heads unevenly."""
    check(run_ranks, [Case(family, rows, degrees) for rows in ROWS])


@pytest.mark.parametrize("degrees", ["one", "u2", "r2", "2x2", "u3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_layers_equal_one_device(run_ranks: RunRanks, family: str, degrees: str) -> None:
    """Every decision, in prefix and in whole mode; rows go round."""
    turn = cycle(ROWS)
    for _ in range(FAMILIES.index(family) + list(DEGREES).index(degrees)):
        next(turn)
    check(run_ranks, [Case(family, next(turn), degrees, memory) for memory in MEMORIES if memory != "graph"])


@pytest.mark.parametrize(
    ("family", "degrees", "memory"),
    [
        ("granite-swa", "u2", "compiled"),
        ("granite-swa", "u2", "products"),
        ("granite-swa", "u2", "compiled graph"),
        ("granite-swa", "r2", "compiled, x+O+KV"),
        ("gemma2", "u2", "compiled"),
    ],
)
def test_compiled_layers_equal_one_device(run_ranks: RunRanks, family: str, degrees: str, memory: str) -> None:
    """One layer has a window and another has none; sinks are an operand of attention that is compiled away from it."""
    check(run_ranks, [Case(family, "packed", degrees, memory)])


def moved_by(token: int, model: Any, handle: Any) -> list[int]:
    """Change a token and return the tokens whose logits moved, bit for bit, over the whole row."""
    batch = ROWS["one document"].batch()
    seen = []
    for change in (False, True):
        ids = batch["input_ids"].clone()
        ids[0, token] = (ids[0, token] + change) % 30 + 1
        with torch.no_grad():
            part = handle.shard(batch | {"input_ids": ids})
            seen.append(handle.gather(model(**part).logits, part))
    return (seen[0] != seen[1]).any(-1)[0].nonzero().flatten().tolist()


def leaks(degrees: str, memory: str, layers: int) -> list[tuple[int, list[int]]]:
    """Return, for some tokens, which logits move when they are changed, in a model of windowed layers."""
    ulysses, ring = DEGREES[degrees]
    model = build("mistral-window", layers=layers).eval()
    handle = longspan.prepare(
        model, ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, memory=MEMORIES[memory], logits=True
    )
    return [(token, moved_by(token, model, handle)) for token in (0, 14, 15, 16, 31, 32, 62)]


@pytest.mark.parametrize("memory", ["graph", "x+O"])
@pytest.mark.parametrize("degrees", ["u2", "r2", "2x2"])
def test_a_token_moves_what_its_window_reaches_and_nothing_else(run_ranks: RunRanks, degrees: str, memory: str) -> None:
    """A window of 7 tokens reaches 6 tokens on, and through two layers 12, across the borders of ranks and tiles."""
    ulysses, ring = DEGREES[degrees]
    for layers in (1, 2):
        for found in run_ranks(ulysses * ring, leaks, degrees, memory, layers):
            for token, moved in found:
                reach = min(63, token + layers * (WINDOW - 1) + 1)
                assert moved == list(range(token, reach)), (token, layers)


def counted() -> tuple[int, int, int]:
    """Count the schedules and tiles that a step makes for the layers of a model with windows, in graph and in tiles."""
    model = build("gemma3", layers=6)
    made: list[Any] = []
    for memory in (Memory(), Memory(5, Keep.X_O)):
        handle = longspan.prepare(model, 1, memory=memory)
        with (
            patch.object(Schedule, "of", side_effect=Schedule.of) as schedules,
            patch.object(Tiles, "of", side_effect=Tiles.of) as tiles,
        ):
            model(**handle.shard(ROWS["packed"].batch())).loss.backward()
        made += [schedules.call_count, tiles.call_count]
        handle.remove()
    part = longspan.prepare(model, 1).shard(Rows([[WINDOW, 3, WINDOW]]).batch())["longspan"]
    return made[0], made[3], int(part.within(WINDOW) is part)


def test_kernel_calls_are_worked_out_once_per_window_and_micro_batch(run_ranks: RunRanks) -> None:
    """Six layers, four of them with a window: two schedules; none more where no document is longer than the window."""
    assert run_ranks(1, counted) == [(2, 2, 1)]


@pytest.mark.parametrize("memory", [Memory(), Memory(3, Keep.X_O)], ids=["graph", "tiles"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_engines_reduce_the_gradients_of_sinks_once(run_ranks: RunRanks, engine: str, memory: Memory) -> None:
    """Sinks are divided among ranks like other parameters under FSDP2, and each rank's share counts its own heads."""
    cases = [steps.Case("granite-swa", degrees, memory, engine, "packed") for degrees in ((2, 1), (1, 2))]
    for wrong in run_ranks(2, steps.all_errors, cases, timeout_s=200):
        assert not wrong


@contextmanager
def no_window() -> Iterator[None]:
    """Let layers with a window see everything."""
    with patch.object(Shard, "within", lambda self, window: self):
        yield


@contextmanager
def wider_window() -> Iterator[None]:
    """Count a window without the token itself."""
    right = Shard.within
    with patch.object(Shard, "within", lambda self, window: right(self, None if window is None else window + 1)):
        yield


@contextmanager
def lost_softcap() -> Iterator[None]:
    """Leave softcaps out."""
    from longspan.integrations.transformers import attention

    with patch.object(attention, "Score", lambda scale, softcap=None: Score(scale)):
        yield


@contextmanager
def no_sinks() -> Iterator[None]:
    """Compute as if there were no sinks."""
    with patch.object(build_module, "absorb_", lambda out, lse, sinks: lse):
        yield


@contextmanager
def sinks_of_others() -> Iterator[None]:
    """Take the sinks of the first heads on every rank."""
    with patch.object(Ulysses, "own", lambda self, sinks: sinks[: len(self.split.query[self.axis.rank])]):
        yield


def wrong_sinks_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    @contextmanager
    def mistake() -> Iterator[None]:
        right = Ulysses.share
        with patch.object(Ulysses, "share", lambda self, d_sinks: change(right(self, d_sinks))):
            yield

    return mistake


MISTAKES: dict[str, Callable[[], Any]] = {
    "no window": no_window,
    "wider window": wider_window,
    "lost softcap": lost_softcap,
    "no sinks": no_sinks,
    "sinks of others": sinks_of_others,
    "no gradient of sinks": wrong_sinks_gradient(torch.zeros_like),
    "gradient of sinks times sp": wrong_sinks_gradient(lambda d: 2 * d),
    "gradient of other sinks": wrong_sinks_gradient(lambda d: d.roll(1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_goes_red_for(run_ranks: RunRanks, mistake: str) -> None:
    family = "gpt-oss" if "sinks" in mistake else "gemma2" if "softcap" in mistake else "mistral-window"
    case = Case(family, "one document", "u2")
    assert exact(run_ranks(2, errors, case))
    for found in run_ranks(2, errors, case, mistake):
        assert not exact([found])

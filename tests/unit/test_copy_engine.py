"""The copy engine in every order that its queues allow: ranks, their queues and their meetings are simulated.

A rank's host runs far ahead of its queues, as on a GPU. Work is then done in random order, restricted only by what the
engine asked to wait for. What the caller sent is overwritten right after the start, and what it got once it is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from longspan.comm.copy_engine import Copy, CopyEngine, _ToHeads
from longspan.comm.heads import HeadSplit
from longspan.comm.symmetric import lines
from longspan.errors import BatchError
from longspan.layout import Piece


@dataclass
class Step:
    """A queued piece of work; it is also its own mark."""

    after: Sequence[Step]
    run: Callable[[], Any]
    done: bool = False


@dataclass
class World:
    """The ranks' buffers and queues."""

    size: int
    slots: int
    slot_bytes: int
    queues: dict[tuple[int, str], list[Step]] = field(default_factory=dict)
    arrived: dict[int, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffers = torch.zeros(self.size, self.slots, self.slot_bytes, dtype=torch.uint8)

    def queue(self, rank: int, name: str, after: Sequence[Step], *runs: Callable[[], Any]) -> Step:
        """Queue steps of which the first waits; return the last."""
        steps = [Step(after if i == 0 else (), run) for i, run in enumerate(runs or (lambda: None,))]
        self.queues.setdefault((rank, name), []).extend(steps)
        return steps[-1]

    def work(self, seed: int) -> None:
        """Do all that is queued; some ranks and queues are much faster than others."""
        chance = random.Random(seed)
        speed = {key: chance.choice((1, 10, 100)) for key in self.queues}
        while left := [key for key, steps in self.queues.items() if steps]:
            ready = [key for key in left if all(mark.done for mark in self.queues[key][0].after)]
            assert ready, "every queue waits for another"
            stuck = True
            while stuck and ready:
                key = chance.choices(ready, [speed[key] for key in ready])[0]
                step = self.queues[key][0]
                if step.run() is False:
                    ready.remove(key)
                    continue
                stuck, step.done = False, True
                self.queues[key].pop(0)
            assert not stuck, "a meeting that not everybody comes to"


class SimulatedLink:
    """A rank of the simulated world."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.slots, self.slot_bytes = world.slots, world.slot_bytes
        self.meetings = 0

    def slot(self, rank: int, number: int) -> Tensor:
        return self.world.buffers[rank, number]

    def stage(self, after: Sequence[Step], copies: Sequence[Copy]) -> Step:
        assert all(to.shape == source.shape for to, source in copies)
        return self.world.queue(self.rank, "own", after, *(lambda c=c: c[0].copy_(c[1]) for c in copies))

    def meet(self, after: Sequence[Step]) -> Step:
        number, self.meetings = self.meetings, self.meetings + 1
        here = self.world.arrived.setdefault(number, set())

        def meet() -> bool:
            here.add(self.rank)
            return len(here) == self.size

        return self.world.queue(self.rank, "meet", after, meet)

    def fetch(self, after: Sequence[Step], copies: Sequence[Copy]) -> Step:
        for to, source in copies:
            for row, from_row in zip(to.unbind(0), source.unbind(0), strict=True):
                lines(row, from_row)  # what a copy engine can do
        return self.world.queue(self.rank, "fetch", after, *(lambda c=c: c[0].copy_(c[1]) for c in copies))

    def wait(self, mark: Step) -> None:
        self.world.queue(self.rank, "own", (mark,))

    def passed(self, mark: Step) -> bool:
        return mark.done


@dataclass(frozen=True)
class Case:
    """Exchanges of one kind: dims of one head, interleaved parts by their lengths."""

    size: int
    heads: int
    kv_heads: int
    tokens: int
    rows: int = 1
    dims: tuple[int, int] = (8, 8)
    parts: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    slots: int = 4
    slot_bytes: int = 16384
    times: int = 6


CASES = {
    "two": Case(2, 4, 2, 12),
    "one token": Case(2, 4, 2, 1),
    "uneven heads": Case(3, 7, 7, 11),
    "replicated KV": Case(4, 8, 2, 9, rows=2),
    "uneven and replicated": Case(4, 9, 3, 10, dims=(6, 10)),
    "three ranks, rows": Case(3, 6, 3, 7, rows=3),
    "interleaved": Case(2, 4, 2, 22, parts=(8, 8, 6), rows=2),
    "interleaved, many chunks": Case(3, 5, 5, 32, parts=(12, 12, 8), slot_bytes=4608, times=4),
    "many chunks": Case(2, 4, 2, 96, slot_bytes=4096),
    "three slots": Case(2, 4, 2, 64, slots=3, slot_bytes=4096),
    "bf16": Case(4, 4, 4, 33, dtype=torch.bfloat16, dims=(3, 5), slot_bytes=4608),
    "fp64": Case(2, 2, 1, 40, dtype=torch.float64, slot_bytes=4096),
}


def whole_tensors(case: Case, number: int) -> tuple[list[Tensor], list[Tensor]]:
    """Make q, k, v for one number, [rank, B, s, heads, D] in the order in which the ranks hold them."""
    made = torch.Generator().manual_seed(number)
    counts, dims = (case.heads, case.kv_heads, case.kv_heads), (case.dims[0], *case.dims)
    shapes = [(case.size, case.rows, case.tokens, n, d) for n, d in zip(counts, dims, strict=True)]
    held = [torch.randn(shape, generator=made, dtype=torch.float64).to(case.dtype) for shape in shapes]
    stops = [sum(case.parts[: i + 1]) for i in range(len(case.parts))] or [case.tokens]
    joined = []
    for t in held:
        runs = [t[:, :, a:b].transpose(0, 1).flatten(1, 2) for a, b in zip([0, *stops], stops, strict=False)]
        joined.append(torch.cat(runs, 1))  # [B, S, heads, D]
    return held, joined


def laid_out_by_heads(t: Tensor) -> Tensor:
    """Copy a tensor [B, s, H, D] into memory in the order in which models hand it over."""
    return t.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def failures(case: Case, seed: int) -> list[str]:
    """Run the exchanges of a case in one order, and name those that gave something else than they should."""
    world = World(case.size, case.slots, case.slot_bytes)
    split = HeadSplit(case.heads, case.kv_heads, case.size)
    heads = [split.query, split.key, split.key]
    stops = [sum(case.parts[: i + 1]) for i in range(len(case.parts))]
    parts = [Piece(a, b) for a, b in zip([0, *stops], stops, strict=False)]
    wrong: list[str] = []
    for rank in range(case.size):
        engine = CopyEngine(SimulatedLink(world, rank))
        flying = []
        for number in range(case.times):
            held, joined = whole_tensors(case, number)
            some = [t[:, :, list(h[rank])] for t, h in zip(joined, heads, strict=True)]
            replicas = [[i for ranks in h for i in ranks] for h in heads]
            back = [t[rank][:, :, order] for t, order in zip(held, replicas, strict=True)]
            for name, start, sent, true in (
                ("heads", engine.to_heads, [t[rank] for t in held], some),
                ("tokens", engine.to_tokens, some, back),
            ):
                sent = [laid_out_by_heads(t) for t in sent]
                flying.append((f"{name} {number} on rank {rank}", start(sent, heads, parts), true))
                world.queue(rank, "own", (), *(lambda t=t: t.fill_(torch.nan) for t in sent))
            while len(flying) > 2:
                read(world, rank, flying.pop(0), wrong)
        while flying:
            read(world, rank, flying.pop(0), wrong)
    world.work(seed)
    return wrong


def read(world: World, rank: int, flight: tuple[str, Any, list[Tensor]], wrong: list[str]) -> None:
    """Queue a comparison of what arrives, and then overwrite it, as who gets freed memory does."""
    name, pending, true = flight
    found = pending.wait()

    def compare() -> None:
        same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, true, strict=True))
        wrong.extend([] if same else [name])
        for t in found:
            t.fill_(torch.nan)

    world.queue(rank, "own", (), compare)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_exchanges_are_right_in_every_order(case: Case) -> None:
    for seed in range(5):
        assert not failures(case, seed), seed


@contextmanager
def without(name: str, position: int) -> Iterator[None]:
    """Leave out one thing that a step waits for: -1 all of it."""
    real = getattr(SimulatedLink, name)

    def careless(self: SimulatedLink, after: Sequence[Step], *rest: Any) -> Step:
        return real(self, [m for i, m in enumerate(after) if i != position and position != -1], *rest)

    with patch.object(SimulatedLink, name, careless):
        yield


@pytest.mark.parametrize(
    ("name", "position"),
    [("stage", -1), ("meet", 0), ("meet", 1), ("fetch", -1)],
    ids=["slot still read", "not staged", "not fetched", "not met"],
)
def test_nothing_that_is_waited_for_can_be_left_out(name: str, position: int) -> None:
    case = CASES["many chunks"]
    with without(name, position):
        assert any(failures(case, seed) for seed in range(40))


def test_results_need_the_wait() -> None:
    with patch.object(SimulatedLink, "wait", lambda self, mark: None):
        assert any(failures(CASES["many chunks"], seed) for seed in range(10))


def test_memory_of_results_that_nobody_takes_stays_until_they_are_here() -> None:
    world, heads = World(2, 3, 4096), [[range(1), range(1, 2)]]
    engines = [CopyEngine(SimulatedLink(world, rank)) for rank in range(2)]

    def start() -> None:
        for engine in engines:
            engine.to_heads([torch.ones(1, 4, 2, 4)], heads)

    start()
    start()
    assert [len(engine._flying) for engine in engines] == [2, 2]
    world.work(0)
    start()
    assert [len(engine._flying) for engine in engines] == [1, 1], "those that are here are let go"


def test_results_that_are_taken_are_the_callers() -> None:
    engine = CopyEngine(SimulatedLink(World(2, 3, 4096), 0))
    pending = engine.to_heads([torch.ones(1, 4, 2, 4)], [[range(1), range(1, 2)]])
    pending.wait()
    assert not engine._flying
    with pytest.raises(RuntimeError, match="taken already"):
        pending.wait()


def test_chunks_start_small_and_fill_slots() -> None:
    link = SimulatedLink(World(2, 4, 2**16), 0)
    exchange = _ToHeads([torch.empty(1, 4000, 4, 8)], [[range(2), range(2, 4)]], (), link)
    sizes = [len(chunk) for chunk in exchange.chunks()]
    most = (2**16 - 512) // 64
    assert sizes == [most // 8, most // 8 * 4, most, most, most, 4000 - most // 8 * 5 - 3 * most]


def test_a_token_that_fits_no_slot_is_refused() -> None:
    engine = CopyEngine(SimulatedLink(World(2, 3, 1024), 0))
    with pytest.raises(BatchError, match="2048 bytes to exchange, more than the 1024 bytes of a slot"):
        engine.to_heads([torch.empty(16, 2, 2, 32)], [[range(1), range(1, 2)]])


def test_a_copy_is_as_few_lines_as_its_memory_allows() -> None:
    whole = torch.empty(6, 4, 8, dtype=torch.bfloat16)
    packed = torch.empty(6, 2, 8, dtype=torch.bfloat16)
    assert lines(whole[:, 1:3], packed) == (64, 32, 32, 6)
    assert lines(whole[2:5], torch.empty_like(whole[2:5])) == (192, 192, 192, 1)
    assert lines(whole[1:2, :3], torch.empty(1, 3, 8, dtype=torch.bfloat16)) == (48, 48, 48, 1)
    assert lines(packed[:0], packed[:0])[3] == 0
    with pytest.raises(ValueError, match="heads of a view lie 16 elements apart"):
        lines(whole[:, ::2], packed)
    with pytest.raises(ValueError, match="No lines lead"):
        lines(packed.transpose(1, 2), packed.transpose(1, 2))
    with pytest.raises(ValueError, match="No lines lead"):
        lines(whole, packed)

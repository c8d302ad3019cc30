"""The copy engine in every order that its queues allow: ranks, their queues and their meetings are simulated.

A rank's host runs far ahead of its queues, as on a GPU. Work is then done in random order, restricted only by what the
engine asked to wait for. What the caller sent is overwritten once it has waited, and what it got once it is read; where
results are borrowed, a rank that runs ahead overwrites them as soon as it may.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from longspan.comm.copy_engine import CopyEngine
from longspan.comm.heads import HeadSplit
from longspan.comm.link import Copy, SharedMemoryError, Slots
from longspan.comm.routes import ToHeads
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
    queues: dict[tuple[int, str], list[Step]] = field(default_factory=dict)
    arrived: dict[int, set[int]] = field(default_factory=dict)
    buffers: list[Tensor] = field(default_factory=list)

    def buffer(self, number: int, *shape: int) -> Tensor:
        """Return the ranks' memory of the given number, made by who asks first."""
        if number == len(self.buffers):
            self.buffers.append(torch.zeros(self.size, *shape, dtype=torch.uint8))
        assert self.buffers[number].shape[1:] == shape, "ranks ask for the same"
        return self.buffers[number]

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

    def __init__(self, world: World, rank: int, most_bytes: int = 2**30) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.meetings = self.allocated = 0
        self.most_bytes = most_bytes

    def allocate(self, count: int, slot_bytes: int) -> Slots:
        if slot_bytes > self.most_bytes:
            raise SharedMemoryError("too much")
        whole = self.world.buffer(self.allocated, count, slot_bytes)
        self.allocated += 1
        return Slots([memory.unbind() for memory in whole])

    def ready(self) -> Step:
        return self.world.queue(self.rank, "own", ())

    def push(self, after: Sequence[Step], copies: Sequence[Copy]) -> None:
        self._queue("push", after, copies)

    def copy(self, after: Sequence[Step], copies: Sequence[Copy]) -> Step:
        return self._queue("copy", after, copies)

    def _queue(self, name: str, after: Sequence[Step], copies: Sequence[Copy]) -> Step:
        for to, source in copies:
            for row, from_row in zip(to.unbind(0), source.unbind(0), strict=True):
                lines(row, from_row)  # what a copy engine can do
        return self.world.queue(self.rank, name, after, *(lambda c=c: c[0].copy_(c[1]) for c in copies))

    def meet(self, after: Sequence[Step]) -> Step:
        number, self.meetings = self.meetings, self.meetings + 1
        here = self.world.arrived.setdefault(number, set())

        def meet() -> bool:
            here.add(self.rank)
            return len(here) == self.size

        return self.world.queue(self.rank, "push", after, meet)

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


@dataclass(frozen=True)
class Habit:
    """What the caller does.

    Args:
        borrow: of each two exchanges, whether their results are borrowed.
        behind: exchanges of which the results are not yet read when the next one starts.
        takes: one of so many results; it forgets the others.
    """

    borrow: tuple[bool, bool] = (False, False)
    behind: int = 2
    takes: int = 1


HABITS = {
    "copied": Habit(),
    "copied, far behind": Habit(behind=7),
    "copied, forgotten": Habit(takes=2),
    "borrowed": Habit((True, True)),
    "borrowed, forgotten": Habit((True, True), takes=3),
    "in turn": Habit((True, False)),
    "in turn, far behind": Habit((False, True), behind=4),
}


def in_time(habit: Habit, case: Case) -> Habit:
    """Return a habit that reads what it borrows before it is overwritten."""
    return replace(habit, behind=case.slots - 2) if all(habit.borrow) else habit


def failures(case: Case, seed: int, habit: Habit = HABITS["copied"]) -> list[str]:
    """Run the exchanges of a case in one order, and name those that gave something else than they should."""
    world = World(case.size)
    split = HeadSplit(case.heads, case.kv_heads, case.size)
    heads = [split.query, split.key, split.key]
    stops = [sum(case.parts[: i + 1]) for i in range(len(case.parts))]
    parts = [Piece(a, b) for a, b in zip([0, *stops], stops, strict=False)]
    wrong: list[str] = []
    for rank in range(case.size):
        engine = CopyEngine(SimulatedLink(world, rank), case.slot_bytes, 2**20, case.slots)
        flying = []
        for number in range(case.times):
            held, joined = whole_tensors(case, number)
            some = [t[:, :, list(h[rank])] for t, h in zip(joined, heads, strict=True)]
            replicas = [[i for ranks in h for i in ranks] for h in heads]
            back = [t[rank][:, :, order] for t, order in zip(held, replicas, strict=True)]
            for name, start, given, true, borrow in (
                ("heads", engine.to_heads, [t[rank] for t in held], some, habit.borrow[0]),
                ("tokens", engine.to_tokens, some, back, habit.borrow[1]),
            ):
                sent = [torch.full_like(laid_out_by_heads(t) if number % 2 else t.clone(), torch.nan) for t in given]
                world.queue(rank, "own", (), *(lambda a=a, b=b: a.copy_(b) for a, b in zip(sent, given, strict=True)))
                with dense_in_queue(world, rank):
                    pending = start(sent, heads, parts, borrow)
                flying.append((f"{name} {number} on rank {rank}", pending, sent, true))
                while len(flying) > habit.behind:
                    read(world, rank, flying, habit, wrong)
        while flying:
            read(world, rank, flying, habit, wrong)
    world.work(seed)
    return wrong


@contextmanager
def dense_in_queue(world: World, rank: int) -> Iterator[None]:
    """Queue what an exchange copies on the caller's queue."""

    def queue(to: Tensor, source: Tensor) -> None:
        world.queue(rank, "own", (), lambda: to.copy_(source))

    with patch("longspan.comm.routes.copy", queue):
        yield


def read(world: World, rank: int, flying: list[Any], habit: Habit, wrong: list[str]) -> None:
    """Queue a comparison of what arrives; then overwrite it if it is ours, as who gets freed memory does, and what was
    sent."""
    name, pending, sent, true = flying.pop(0)
    if int(name.split()[1]) % habit.takes:
        return
    found = pending.wait()

    def compare() -> None:
        same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, true, strict=True))
        wrong.extend([] if same else [name])
        for t in [*found, *sent]:
            t.fill_(torch.nan)

    world.queue(rank, "own", (), compare)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("habit", HABITS.values(), ids=HABITS)
def test_exchanges_are_right_in_every_order(case: Case, habit: Habit) -> None:
    for seed in range(2):
        assert not failures(case, seed, in_time(habit, case)), seed


@contextmanager
def without(name: str, position: int) -> Iterator[None]:
    """Leave out one thing that a step waits for."""
    real = getattr(SimulatedLink, name)

    def careless(self: SimulatedLink, after: Sequence[Step], *rest: Any) -> Step:
        return real(self, [m for i, m in enumerate(after) if i != position], *rest)

    with patch.object(SimulatedLink, name, careless):
        yield


@pytest.mark.parametrize(
    ("habit", "name", "position"),
    [
        ("copied", "push", 0),
        ("copied", "meet", 0),
        ("copied", "copy", 0),
        ("borrowed", "push", 0),
        ("borrowed", "copy", 0),
        ("borrowed, forgotten", "copy", 1),
        ("borrowed, forgotten", "meet", 0),
    ],
    ids=["not made", "still read", "not arrived", "not made, lent", "own not made", "still pushed", "own still copied"],
)
def test_nothing_that_is_waited_for_can_be_left_out(habit: str, name: str, position: int) -> None:
    # With three slots, what shares a slot goes in the other direction and lies elsewhere in it.
    case = replace(CASES["three slots" if "forgotten" in habit else "many chunks"], times=8)
    with without(name, position):
        assert any(failures(case, seed, in_time(HABITS[habit], case)) for seed in range(40))


def test_the_meeting_cannot_be_left_out() -> None:
    def careless(self: SimulatedLink, after: Sequence[Step]) -> Step:
        return self.world.queue(self.rank, "push", after)

    for habit in ("copied", "borrowed"):
        with patch.object(SimulatedLink, "meet", careless):
            assert any(failures(CASES["many chunks"], seed, HABITS[habit]) for seed in range(10))


@pytest.mark.parametrize("habit", ["copied", "borrowed"])
@pytest.mark.parametrize("which", [0, 1])
def test_results_need_each_wait(habit: str, which: int) -> None:
    if habit == "copied" and which:
        return
    real, calls = SimulatedLink.wait, [0]

    def careless(self: SimulatedLink, mark: Step) -> None:
        calls[0] += 1
        if (calls[0] - 1) % (2 if habit == "borrowed" else 1) != which:
            real(self, mark)

    with patch.object(SimulatedLink, "wait", careless):
        assert any(failures(CASES["many chunks"], seed, HABITS[habit]) for seed in range(20))


def test_what_is_borrowed_lasts_as_long_as_promised_and_not_longer() -> None:
    case = replace(CASES["two"], times=8)
    assert not any(failures(case, seed, Habit((True, True), behind=2)) for seed in range(20))
    assert any(failures(case, seed, Habit((True, True), behind=3)) for seed in range(40))


def test_slots_for_borrowed_results_grow_and_what_was_borrowed_stays() -> None:
    """Each rank's lengths grow while results are still out; old slots go once nobody can read or write them."""
    world, heads, wrong = World(2), [[range(1), range(1, 2)]], []
    engines = [CopyEngine(SimulatedLink(world, rank), 4096, 2**20) for rank in range(2)]
    lengths = [4, 40, 40, 41, 400, 3, 3, 3, 3, 3]
    for rank, engine in enumerate(engines):
        flying: list[Any] = []
        for number, tokens in enumerate(lengths):
            sent = torch.full((1, tokens, 2, 8), float(number))
            flying.append((f"heads {number} on {rank}", engine.to_heads([sent], heads, (), True), [sent]))
            flying[-1] += ([torch.full((1, 2 * tokens, 1, 8), float(number))],)
            while len(flying) > 2:
                read(world, rank, flying, Habit(), wrong)
        while flying:
            read(world, rank, flying, Habit(), wrong)
        assert len(engine._outgrown) == 3, "nothing has been read yet"
    assert [buffer.shape[2] for buffer in world.buffers] == [4096, 256, 2560, 3072, 28672]
    world.work(3)
    assert not wrong
    for engine in engines:
        engine.to_heads([torch.ones(1, 3, 2, 8)], heads, (), True)
        assert not engine._outgrown
    world.work(3)


def test_results_that_no_slot_holds_are_copied() -> None:
    world, heads = World(2), [[range(1), range(1, 2)]]
    links = [SimulatedLink(world, rank, most_bytes=4096) for rank in range(2)]
    engines = [CopyEngine(link, 2048, 8192) for link in links]
    small, large, too_large = (torch.ones(1, tokens, 2, 8) for tokens in (40, 100, 200))
    for engine, link in zip(engines, links, strict=True):
        engine.to_heads([small], heads, (), True)
        assert (link.allocated, link.meetings) == (2, 1)
        engine.to_heads([too_large], heads, (), True)
        assert (link.allocated, link.meetings) == (2, 1 + 5)
        with pytest.warns(UserWarning, match="as no memory for them is shared: too much"):
            engine.to_heads([large], heads, (), True)
        engine.to_heads([large], heads, (), True)
        engine.to_heads([small], heads, (), True)
        assert link.allocated == 2
    world.work(0)


def test_memory_of_what_nobody_takes_stays_until_it_is_here() -> None:
    world, heads = World(2), [[range(1), range(1, 2)]]
    engines = [CopyEngine(SimulatedLink(world, rank), 4096, 2**20) for rank in range(2)]

    def start(borrow: bool) -> None:
        for engine in engines:
            engine.to_heads([torch.ones(1, 4, 2, 4)], heads, (), borrow)

    start(False)
    start(True)
    assert [len(engine._flying) for engine in engines] == [2, 2]
    world.work(0)
    start(False)
    assert [len(engine._flying) for engine in engines] == [1, 1], "those that are here are let go"


def test_what_is_sent_is_held_until_it_has_been_waited_for() -> None:
    engine = CopyEngine(SimulatedLink(World(2), 0), 4096)
    sent = torch.ones(1, 4, 2, 4)
    gone = weakref.ref(sent)
    pending = engine.to_heads([sent], [[range(1), range(1, 2)]])
    del sent
    assert gone() is not None
    pending.wait()
    engine.link.world.queues.clear()  # type: ignore[attr-defined]
    assert gone() is None
    assert not engine._flying
    with pytest.raises(RuntimeError, match="taken already"):
        pending.wait()


def test_chunks_are_as_few_as_slots_allow_and_nearly_equal() -> None:
    exchange = ToHeads([torch.empty(1, 4000, 4, 8)], [[range(2), range(2, 4)]], (), 2, 0)
    most = (2**16 - 512) // 64
    sizes = [len(chunk) for chunk in exchange.chunks(2**16)]
    assert (sum(sizes), len(sizes)) == (4000, -(-4000 // most))
    assert max(sizes) - min(sizes) <= 1


def test_heads_side_by_side_are_sent_as_they_are() -> None:
    whole = torch.empty(2, 5, 6, 8)
    for t in (whole, whole[:, :, 1:3], whole[:, 2:], whole[:, :, ::6]):
        assert ToHeads([t], [[range(1), range(1)]], (), 2, 0).tensors[0] is t
    for t in (whole.transpose(1, 2), whole[..., ::2], whole[:, :, ::2]):
        dense = ToHeads([t], [[range(1), range(1)]], (), 2, 0).tensors[0]
        assert dense.is_contiguous() and dense.shape == t.shape


def test_too_few_slots_and_a_token_that_fits_none_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3 slots, got 2"):
        CopyEngine(SimulatedLink(World(2), 0), 1024, slots=2)
    engine = CopyEngine(SimulatedLink(World(2), 0), 1024)
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

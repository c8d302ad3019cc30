"""Host memory that is reserved before a step is what the step uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

import longspan
from longspan.errors import ConfigError, TrainingError
from longspan.keep import Budget, Keep, Memory
from longspan.stream.arena import HostMemory
from longspan.stream.stash import Stash
from models import Rows, build
from pool import RunRanks
from test_stream import wide
from test_tiers import COMPILED, LAYERS, PATTERNS, memory_of

pytestmark = pytest.mark.dist

TILE = 16
SHORT, LONG = Rows([[2 * TILE]]), Rows([[20, 1, 6, 55, 14]])  # multiples of an alignment: sizes add up to the byte
TILE_BYTES = 3200  # of a tile's attention output, by which a tier is filled up


@contextmanager
def pins() -> Iterator[list[int]]:
    """Record up to which byte host memory was to be pinned."""
    found: list[int] = []
    right = HostMemory.pin

    def pin(self: HostMemory, start: int, stop: int) -> None:
        right(self, start, stop)
        if self.portion == 1 << 30:  # not a file's buffers
            found.append(stop)

    with patch.object(HostMemory, "pin", pin):
        yield found


def reserved_and_used(memories: list[Memory], degrees: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Return the bytes of a short step, those that are reserved for a long one, and those that it uses."""
    model = build("llama", layers=LAYERS)
    ulysses, ring = degrees
    found = []
    with wide(), pins() as pinned:
        for memory in memories:
            handle = longspan.prepare(model, ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, memory=memory)
            most = []
            for rows in (SHORT, LONG):
                part = handle.shard(rows.batch())
                if rows is LONG:
                    handle.reserve(part)
                    most.append(max(pinned, default=0))
                    pinned.clear()
                model(**part).loss.backward()
                most.append(max(pinned, default=0))
                pinned.clear()
            handle.remove()
            model.zero_grad()
            found.append((most[0], most[1], most[2]))
    return found


@pytest.mark.parametrize(
    ("budget", "degrees", "names", "slack"),
    [
        ("host", (1, 1), tuple(PATTERNS), 0),
        ("gpu and host", (2, 1), tuple(PATTERNS)[::2], TILE_BYTES),
        ("all", (1, 2), tuple(PATTERNS)[1::3], TILE_BYTES),
    ],
    ids=["host", "gpu and host", "all"],
)
def test_what_is_reserved_is_what_is_used(
    run_ranks: RunRanks, budget: str, degrees: tuple[int, int], names: tuple[str, ...], slack: int
) -> None:
    memories = [memory_of(name, budget, TILE) for name in names]
    for found in run_ranks(degrees[0] * degrees[1], reserved_and_used, memories, degrees):
        for name, memory, (short, reserved, used) in zip(names, memories, found, strict=True):
            assert abs(reserved - used) <= slack, (name, reserved, used)
            assert reserved <= memory.budget.host_bytes
            assert slack or short < reserved, "without it the step would pin more"


def test_products_are_reserved_for(run_ranks: RunRanks) -> None:
    ((short, reserved, used),) = run_ranks(
        1, reserved_and_used, [memory_of(next(iter(COMPILED)), "host", TILE, "aot_eager")], (1, 1)
    )[0]
    assert short < reserved == used


def refusals() -> list[str]:
    model, said = build("llama", layers=2), []
    with wide(), pins() as pinned:
        for memory in (Memory(TILE, Keep.X_O), Memory(TILE, Keep.X_O, budget=Budget(0, 40_000))):
            handle = longspan.prepare(model, 1, memory=memory)
            part = handle.shard(LONG.batch())
            for step in (True, False):
                try:
                    handle.reserve(part)
                except (ConfigError, TrainingError) as error:
                    said.append(str(error))
                if step:
                    model(**handle.shard(SHORT.batch())).loss.backward()
                    pinned.clear()
            assert not pinned, "what is refused, or leaves the GPU never, pins nothing"
            handle.remove()
    return said


def test_what_cannot_be_reserved(run_ranks: RunRanks) -> None:
    unknown, too_much = run_ranks(1, refusals)[0]
    assert "run a step with the same memory setting, however short" in unknown
    assert "The layers keep 79872 bytes for backward" in too_much and "Raise host_bytes" in too_much


def test_no_more_than_the_budget() -> None:
    stash = Stash(torch.device("cpu"), Budget(0, 1000))
    stash.reserve(1000)
    with pytest.raises(ConfigError, match="1,001 bytes are more than host_bytes=1,000"):
        stash.reserve(1001)

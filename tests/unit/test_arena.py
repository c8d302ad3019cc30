"""Memory that is handed out never overlaps, and all of it comes back."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import ConfigError, TrainingError
from longspan.stream.arena import FileArena, FreeList, HostArena, HostMemory

CPU = torch.device("cpu")


class Bytes:
    """The slow twin: one flag per byte."""

    def __init__(self) -> None:
        self.used: set[int] = set()

    def take(self, start: int, size: int) -> None:
        mine = set(range(start, start + size))
        assert not mine & self.used
        self.used |= mine

    def give(self, start: int, size: int) -> None:
        self.used -= set(range(start, start + size))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=60),
    st.sampled_from([None, 64, 200]),
    st.sampled_from([1, 8]),
)
def test_a_free_list_never_hands_out_a_byte_twice(steps: list[tuple[int, int]], capacity: int, alignment: int) -> None:
    space, twin, held = FreeList(capacity, alignment), Bytes(), []
    for choice, size in steps:
        if choice == 0 and held:
            start, old = held.pop(size % len(held))
            space.give(start, old)
            twin.give(start, -(-old // alignment) * alignment)
        else:
            rounded = -(-size // alignment) * alignment
            found = space.take(size)
            if found is None:
                assert capacity is not None
                assert not any(twin.used.isdisjoint(range(a, a + rounded)) for a in range(capacity - rounded + 1))
                continue
            assert found % alignment == 0 and (capacity is None or found + rounded <= capacity)
            twin.take(found, rounded)
            held.append((found, size))
        assert space.used == len(twin.used)
        assert all(a < b for a, b in space.holes) and all(
            a[1] < b[0] for a, b in zip(space.holes, space.holes[1:], strict=False)
        )
    for start, size in held:
        space.give(start, size)
    assert (space.used, space.end, space.holes) == (0, 0, [])


def test_host_tensors_hold_their_memory_and_give_it_back() -> None:
    arena = HostArena(256, CPU)
    like = torch.arange(10, dtype=torch.float64)
    taken = arena.take([like, like[:2]])
    assert taken is not None
    (first, region), (second, _) = taken
    first.copy_(like)
    second.fill_(7)
    assert torch.equal(first, like) and first.shape == like.shape
    assert arena.take([like]) is None
    view, first = first[4:], second
    del taken, second
    gc.disable()
    try:
        assert region.alive and arena.take([like]) is None
        del view
        assert not region.alive
        assert arena.take([like]) is not None
        assert arena.take([like, like]) is None, "half of a request that fails"
        arena.collect()
        assert arena.space.used == 64
        del first
        arena.collect()
        assert arena.space.used == 0
    finally:
        gc.enable()


def test_memory_outlives_its_arena_while_a_tensor_needs_it() -> None:
    arena = HostArena(128, CPU)
    taken = arena.take([torch.ones(3)])
    assert taken is not None
    tensor = taken[0][0].fill_(5)
    del arena, taken
    assert tensor.tolist() == [5, 5, 5]


class FakeCudart:
    """Stands in for CUDA's runtime."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append((address, size))
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        self.calls.append((address, None))


def test_memory_is_pinned_once_as_it_comes_into_use() -> None:
    fake = FakeCudart()
    with (
        patch("longspan.stream.arena._cudart", lambda: fake),
        patch("torch.cuda.device"),
        patch("torch.cuda.synchronize"),
    ):
        memory = HostMemory(250, torch.device("cuda:0"), portion=100)
        base = memory.address
        memory.pin(0, 100)
        memory.pin(20, 60)
        assert fake.calls == [(base, 100)]
        memory.pin(150, 240)
        assert fake.calls[1:] == [(base + 100, 100), (base + 200, 50)]
        assert list(memory.cut(50, 230)) == [(50, 100), (100, 200), (200, 230)]
        del fake.calls[:]
        del memory
        assert sorted(fake.calls) == [(base, None), (base + 100, None), (base + 200, None)]
        broken = HostMemory(250, torch.device("cuda:0"), portion=100)
        fake.code = 2
        with pytest.raises(ConfigError, match="does not pin .* lower host_bytes"):
            broken.pin(0, 1)


def test_more_host_memory_than_there_is() -> None:
    with pytest.raises(ConfigError, match="does not give out"):
        HostArena(1 << 60, CPU)


def test_a_file_is_nameless_and_mapped(tmp_path: Path) -> None:
    arena = FileArena(str(tmp_path))
    assert not list(tmp_path.iterdir())
    like = torch.arange(7, dtype=torch.bfloat16)
    taken = arena.take([like, like[:3]])
    (first, at), (second, behind) = taken
    os.pwrite(arena.file.fileno(), like.view(torch.uint8).numpy().tobytes(), at.start)
    os.pwrite(arena.file.fileno(), b"\0" * 6, behind.start)
    assert torch.equal(first, like) and second.tolist() == [0, 0, 0]
    used = arena.space.used
    del taken, first
    arena.collect()
    assert arena.space.used == used == mmap.ALLOCATIONGRANULARITY, "one range for all"
    del second
    arena.collect()
    assert arena.space.used == 0


def test_a_file_that_does_not_grow_keeps_nothing(tmp_path: Path) -> None:
    arena = FileArena(str(tmp_path))

    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    with patch("os.posix_fallocate", full), pytest.raises(TrainingError, match="make room there"):
        arena.take([torch.ones(4)])
    assert arena.space.used == 0
    assert arena.take([torch.ones(4)])

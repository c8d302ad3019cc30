"""What decides for or against copy engines, and what they are told, without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.comm import exchange, symmetric
from longspan.comm.exchange import copy
from longspan.comm.link import SharedMemoryError
from longspan.comm.symmetric import Runtime, problem_of
from longspan.mesh import Axis


class Library:
    """Records the calls of the CUDA runtime."""

    def __init__(self, error: int = 0) -> None:
        self.calls: list[tuple[int, ...]] = []

        def copy_lines(*args: int) -> int:
            self.calls.append(args)
            return error

        def explain(error: int) -> bytes:
            return b"invalid argument"

        self.cudaMemcpy2DAsync, self.cudaGetErrorString = copy_lines, explain


def runtime(library: Library) -> Runtime:
    with (
        patch.object(symmetric, "_runtime_path", lambda: "libcudart.so.13"),
        patch.object(symmetric.ctypes, "CDLL", lambda path: library),
    ):
        return Runtime()


def test_each_row_is_one_copy_of_lines() -> None:
    library = Library()
    whole = torch.zeros(2, 6, 4, 8, dtype=torch.bfloat16)
    packed = torch.zeros(2, 3, 2, 8, dtype=torch.bfloat16)
    runtime(library).copy(whole[:, 1:4, 2:4], packed, 77)
    first = whole.data_ptr() + (1 * 4 + 2) * 8 * 2
    assert library.calls == [
        (first, 64, packed.data_ptr(), 32, 32, 3, 4, 77),
        (first + 6 * 64, 64, packed.data_ptr() + 96, 32, 32, 3, 4, 77),
    ]


def test_nothing_is_copied_of_nothing() -> None:
    library = Library()
    runtime(library).copy(torch.zeros(2, 0, 4, 8), torch.zeros(2, 0, 4, 8), 0)
    runtime(library).copy(torch.zeros(2, 3, 0, 8), torch.zeros(2, 3, 0, 8), 0)
    assert not library.calls


def test_an_error_of_the_runtime_is_told() -> None:
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync: invalid argument"):
        runtime(Library(error=1)).copy(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)


def test_a_runtime_that_is_not_loaded_is_a_reason() -> None:
    def load() -> None:
        Runtime()

    with patch.object(torch.version, "cuda", "999.1"):
        assert problem_of(load) == ("OSError: libcudart.so.999 is not loaded into this process")


def test_a_failure_without_words_is_a_reason_too() -> None:
    def fail() -> None:
        raise MemoryError

    assert problem_of(fail) == "MemoryError: no message"
    assert problem_of(lambda: None) is None


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([("a", "g0"), ("b", "g1")], "several nodes"),
        ([("a", "g0"), ("a", "g0")], "share a GPU"),
        ([("a", "g0"), ("a", "g2")], "GPU 0 cannot access GPU 2"),
        ([("a", "g0"), ("a", "g1")], None),
        ([("a", "g0"), ("a", "unseen")], None),
    ],
)
def test_gpus_that_cannot_reach_each_other_are_seen_before_anything_is_shared(
    places: list[tuple[str, str]], told: str | None
) -> None:
    class Properties:
        def __init__(self, index: int) -> None:
            self.uuid = f"g{index}"

    with (
        patch.object(torch.cuda, "device_count", lambda: 3),
        patch.object(torch.cuda, "get_device_properties", Properties),
        patch.object(torch.cuda, "can_device_access_peer", lambda a, b: b != 2),
    ):
        place = symmetric._Place(torch.device("cuda", 0))
        assert place.told()[1] == "g0"
        why = place.problem(places)
    assert why is None if told is None else told in str(why)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_copies_in_larger_units_are_copies(data: st.DataObject) -> None:
    """Any views: offsets, strides and dims that divide by the unit, and those that do not."""
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]))
    shape = (2, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4)), data.draw(st.integers(1, 40)))

    def room() -> tuple[torch.Tensor, tuple[slice, ...]]:
        sizes = [n + data.draw(st.integers(0, 9)) for n in shape]
        order = data.draw(st.permutations([0, 1, 2]))
        made = torch.randint(0, 200, sizes).to(dtype).permute(*order, 3).contiguous()
        return made.permute(*(order.index(i) for i in range(3)), 3), tuple(
            slice(m - n, m) for n, m in zip(shape, sizes, strict=True)
        )

    (whole, at), (other, place) = room(), room()
    true = whole.clone()
    true[at] = other[place]
    copy(whole[at], other[place])
    assert torch.equal(whole, true)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[..., :6],
        lambda t: t[..., 1:9],
        lambda t: t[..., ::2],
        lambda t: t.transpose(1, 2),
        lambda t: t.view(-1)[3:].as_strided((4, 8), (9, 1)),
    ],
    ids=["dim", "offset", "every other", "transposed", "stride"],
)
def test_views_that_no_larger_unit_divides_are_copied_as_they_are(view: Any) -> None:
    whole, other = torch.zeros(3, 16, 16, dtype=torch.bfloat16), torch.rand(3, 16, 16).to(torch.bfloat16)
    true = whole.clone()
    view(true).copy_(view(other))
    copy(view(whole), view(other))
    assert torch.equal(whole, true)


def test_dense_heads_are_copied_sixteen_bytes_at_a_time() -> None:
    to, start = torch.zeros(1, 5, 4, 64, dtype=torch.bfloat16), torch.ones(1, 5, 2, 64, dtype=torch.bfloat16)
    used: list[Any] = []
    real = torch.Tensor.copy_
    with patch.object(torch.Tensor, "copy_", lambda a, b: used.append(a.dtype) or real(a, b)):
        copy(to[:, :, 1:3], start)
        copy(to[..., 1:33], start[:, :, :1, :32].expand(1, 5, 4, 32))
        copy(to[:, :, 1:3], start.float())
    assert used == [torch.complex128, torch.bfloat16, torch.bfloat16]
    assert exchange._UNITS[0].itemsize == 16


class Stream:
    """Records what is asked of a CUDA stream."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.cuda_stream = log, name, 7
        self.events = 0

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        return f"{self.name} {self.events}"

    def synchronize(self) -> None:
        self.log.append(f"{self.name} ends")


class Handle:
    """Stands in for the symmetric memory of two ranks."""

    rank, world_size = 0, 2

    def __init__(self, log: list[str]) -> None:
        self.log, self.memory = log, torch.zeros(2, 3, 1024, dtype=torch.uint8)

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.memory[rank].view(sizes).view(dtype)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms >= 10 * 60 * 1000
        self.log.append(f"barrier {channel}")


def test_each_queue_is_a_stream_and_all_copies_take_the_copy_engines() -> None:
    log: list[str] = []
    library = Library()
    used = runtime(library)
    streams = [Stream(log, name) for name in ("pushing", "copying", "own")]
    axis = Axis(2, 0, (0, 1), group=cast(Any, "group"))
    handles = [Handle(log), Handle(log), Handle(log)]
    coming = iter(handles)
    device = torch.device("cuda", 0)
    made = iter(streams)
    with (
        patch.object(symmetric, "Runtime", lambda: used),
        patch.object(symmetric, "agreed", lambda why, axis: why),
        patch.object(symmetric, "allocate_symmetric", lambda size, device: torch.zeros(size)),
        patch.object(torch, "empty", lambda *shape, dtype, device: torch.zeros(shape, dtype=dtype)),
        patch.object(torch.cuda, "empty_cache", lambda: log.append("cache emptied")),
        patch("torch.distributed._symmetric_memory.rendezvous", lambda memory, group: next(coming)),
        patch.object(torch.cuda, "Stream", lambda device, priority: next(made)),
        patch.object(torch.cuda, "current_stream", lambda device: streams[2]),
        patch.object(torch.cuda, "stream", lambda stream: nullcontext(log.append(f"on {stream.name}"))),
    ):
        link = symmetric.SymmetricLink(axis, device)
        slots, more = (link.allocate(3, 1024) for _ in range(2))
        assert log == ["cache emptied", "copying ends"] * 2
        assert len(library.calls) == 4, "every rank's memory was tried"
        assert link.meeting is handles[0], "meetings stay where they are"
        handles[2].rank = 1
        with pytest.raises(SharedMemoryError, match="another order"):
            link.allocate(3, 1024)
        log.clear()
        library.calls.clear()
        to, start = torch.zeros(1, 4, 2, 8), torch.ones(1, 4, 2, 8)
        ready = link.ready()
        link.push([ready], [(to, start)])
        met = link.meet(["a"])
        copied = link.copy([met, "b"], [(start, to)])
        link.wait(copied)
    pair = (to.data_ptr(), start.data_ptr())
    assert library.calls == [(a, 256, b, 256, 256, 1, 4, 7) for a, b in (pair, pair[::-1])]
    assert (slots.bytes, slots.buffers[1][2].data_ptr()) == (1024, handles[0].memory[1, 2].data_ptr())
    assert more.buffers[0][1].data_ptr() == handles[1].memory[0, 1].data_ptr()
    assert log == [
        "pushing waits for own 1",
        "pushing waits for a",
        "on pushing",
        "barrier 0",
        "copying waits for pushing 1",
        "copying waits for b",
        "own waits for copying 1",
    ]

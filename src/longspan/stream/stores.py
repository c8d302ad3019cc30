"""Copies of tensors out of a GPU and back into it, beside what the GPU computes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longspan.errors import TrainingError
from longspan.plan.kept import Tier
from longspan.stream.arena import Arena, FileArena, HostArena, HostMemory, Region

Mark = Any
"""A CUDA event; None on CPUs, where everything is done when it is asked for."""


class Lane:
    """A stream of its own on a GPU; nothing on CPUs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """Return a mark of all that the current stream was given so far."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def join(self, done: Mark) -> None:
        """Let the current stream wait until `done`; the host goes on."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark) -> Mark:
        """Copy to the first of each pair from the second, once `after` is reached; return the mark of their end."""
        with self._current(), torch.no_grad():
            if self.stream is not None:
                self.stream.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return None if self.stream is None else self.stream.record_event()

    @contextmanager
    def _current(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield


class Copying:
    """A copy that is under way.

    Args:
        result: waits, if it must, until the copy was given to the GPU, and returns the mark of its end.
    """

    def __init__(self, lane: Lane, result: Callable[[], Mark]) -> None:
        self._lane, self._result = lane, result

    def join(self) -> None:
        """Let the current stream wait for it."""
        self._lane.join(self._result())

    def finish(self) -> None:
        """Let the host wait for it."""
        done = self._result()
        if done is not None:
            done.synchronize()


class Store(ABC):
    """Memory outside the GPU, with copies to it and from it."""

    tier: Tier
    arena: Arena

    @abstractmethod
    def leave(self, sources: Sequence[Tensor], regions: Sequence[Region]) -> Copying:
        """Start copying contiguous tensors out; until that is done they must live unchanged."""

    @abstractmethod
    def come(self, targets: Sequence[Tensor], regions: Sequence[Region]) -> Copying:
        """Start copying regions into contiguous tensors, which the current stream may use after `join`."""


class HostStore(Store):
    """Host memory; all copies run on one stream, so a range may be reused as soon as its copy was asked for."""

    tier = Tier.HOST

    def __init__(self, arena: HostArena, device: torch.device) -> None:
        self.arena, self.memory, self.lane = arena, arena.memory, Lane(device)

    def leave(self, sources: Sequence[Tensor], regions: Sequence[Region]) -> Copying:
        """See `Store`."""
        return self._copy([(host, device) for host, device in self._pairs(sources, regions)])

    def come(self, targets: Sequence[Tensor], regions: Sequence[Region]) -> Copying:
        """See `Store`."""
        return self._copy([(device, host) for host, device in self._pairs(targets, regions)])

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Copying:
        done = self.lane.copy(pairs, self.lane.mark())
        return Copying(self.lane, lambda: done)

    def _pairs(self, tensors: Sequence[Tensor], regions: Sequence[Region]) -> Iterator[tuple[Tensor, Tensor]]:
        for tensor, region in zip(tensors, regions, strict=True):
            flat = bytes_of(tensor)
            for start, stop in self.memory.cut(region.start, region.stop):
                yield self.memory.bytes[start:stop], flat[start - region.start : stop - region.start]


class FileStore(Store):
    """A file, written and read in order by a thread, through two small pinned buffers that take turns.

    Args:
        chunk: bytes of each buffer.
    """

    tier = Tier.FILE

    def __init__(self, arena: FileArena, device: torch.device, chunk: int = 1 << 26) -> None:
        self.arena, self.file, self.directory, self.chunk = arena, arena.file, arena.directory, chunk
        self.lane = Lane(device)
        self.memory = HostMemory(2 * chunk, device, portion=chunk)
        self.busy: list[Mark] = [None, None]  # until then the buffer is in a GPU's use
        self._thread = ThreadPoolExecutor(1, "longspan-file")

    def leave(self, sources: Sequence[Tensor], regions: Sequence[Region]) -> Copying:
        """See `Store`."""
        return self._copying(self._thread.submit(self._write, sources, regions, self.lane.mark()), "written")

    def come(self, targets: Sequence[Tensor], regions: Sequence[Region]) -> Copying:
        """See `Store`."""
        return self._copying(self._thread.submit(self._read, targets, regions, self.lane.mark()), "read")

    def _copying(self, future: Future[Mark], what: str) -> Copying:
        def result() -> Mark:
            try:
                return future.result()
            except OSError as error:
                raise TrainingError(
                    f"Kept tensors could not be {what} in the directory {self.directory} ({error}). This step is lost, "
                    "the model is as before it."
                ) from error.with_traceback(None)  # whose frames hold the future that holds the error

        return Copying(self.lane, result)

    def _write(self, sources: Sequence[Tensor], regions: Sequence[Region], after: Mark) -> Mark:
        waiting: list[tuple[int, int, int, Mark]] = []
        for number, (flat, at, a, b) in enumerate(self._chunks(sources, regions)):
            if len(waiting) == 2:
                self._put(*waiting.pop(0))  # while the chunk after it is on its way from the GPU
            slot = self._slot(number)
            done = self.busy[slot] = self.lane.copy([(self._buffer(slot, b - a), flat[a:b])], after)
            waiting.append((slot, at, b - a, done))
        for chunk in waiting:
            self._put(*chunk)
        return None

    def _put(self, slot: int, at: int, size: int, done: Mark) -> None:
        if done is not None:
            done.synchronize()
        view, written = memoryview(self.memory.map)[slot * self.chunk :][:size], 0
        while written < size:
            written += os.pwritev(self.file.fileno(), [view[written:]], at + written)

    def _read(self, targets: Sequence[Tensor], regions: Sequence[Region], after: Mark) -> Mark:
        done: Mark = None
        for number, (flat, at, a, b) in enumerate(self._chunks(targets, regions)):
            slot, read = self._slot(number), 0
            view = memoryview(self.memory.map)[slot * self.chunk :][: b - a]
            while read < b - a:
                count = os.preadv(self.file.fileno(), [view[read:]], at + read)
                if count == 0:
                    raise OSError("the file ends too early")
                read += count
            done = self.busy[slot] = self.lane.copy([(flat[a:b], self._buffer(slot, b - a))], after)
        return done

    def _slot(self, number: int) -> int:
        """Return the buffer of a chunk, once it is free."""
        self.memory.pin(0, self.memory.size)
        slot = number % 2
        if self.busy[slot] is not None:
            self.busy[slot].synchronize()
            self.busy[slot] = None
        return slot

    def _buffer(self, slot: int, size: int) -> Tensor:
        return self.memory.bytes[slot * self.chunk :][:size]

    def _chunks(self, tensors: Sequence[Tensor], regions: Sequence[Region]) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield a tensor's bytes, where some of them are in the file, and which these are, a buffer at a time."""
        for tensor, region in zip(tensors, regions, strict=True):
            flat = bytes_of(tensor)
            for a in range(0, flat.numel(), self.chunk):
                yield flat, region.start + a, a, min(a + self.chunk, flat.numel())


def bytes_of(t: Tensor) -> Tensor:
    """View a contiguous tensor as bytes."""
    return t.detach().view(-1).view(torch.uint8)

"""Carry chunks of tensors between a device and the host, and work on them there beside the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

LANES = 2
"""Chunks under way at once: while one is computed on, another is carried."""


class Lane(Protocol):
    """Carries one chunk at a time, used by one thread at a time."""

    def fetch(self, source: Tensor, ready: Any) -> Tensor:
        """Return a flat chunk as a tensor on the host, good until the lane is used again.

        Args:
            ready: what `Lanes.ready` returned once the chunk was there to read.
        """
        ...

    def widened(self, fetched: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what was fetched in a dtype, good until the lane is used again."""
        ...

    def store(self, result: Tensor, target: Tensor) -> None:
        """Round a result on the host to a chunk of the device's, after all that `ready` stood for."""
        ...

    def settle(self) -> None:
        """Let what the caller runs on the device from now on see what was stored."""
        ...


class HostLane:
    """Serves tensors that are on the host: nothing is carried."""

    def fetch(self, source: Tensor, ready: Any) -> Tensor:
        """Return the chunk itself."""
        return source

    def widened(self, fetched: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert, if need be."""
        return fetched.to(dtype)

    def store(self, result: Tensor, target: Tensor) -> None:
        """Copy."""
        target.copy_(result)

    def settle(self) -> None:
        """Do nothing."""


class PinnedLane:
    """Carries through one pinned buffer on a stream of its own.

    All copies of a lane are in its stream's order, so results leave the buffer before the next chunk comes in.

    Args:
        buffer_bytes: of the largest chunk.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffer = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True)
        self._wide = torch.empty(0)  # kept, as memory fresh from the system costs more than the conversion
        self._arrived = torch.cuda.Event(blocking=True)  # a waiting thread sleeps; the cores have other work

    def fetch(self, source: Tensor, ready: Any) -> Tensor:
        """Copy to the buffer and wait for it to arrive."""
        staged = self._staged(source)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            staged.copy_(source, non_blocking=True)
            self._arrived.record(self._stream)
        self._arrived.synchronize()
        return staged

    def widened(self, fetched: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert into memory of the lane's own."""
        if fetched.dtype == dtype:
            return fetched
        if self._wide.dtype != dtype or self._wide.numel() < fetched.numel():
            self._wide = torch.empty(fetched.numel(), dtype=dtype)
        return self._wide[: fetched.numel()].copy_(fetched)

    def store(self, result: Tensor, target: Tensor) -> None:
        """Round into the buffer and start the copy back."""
        staged = self._staged(target)
        staged.copy_(result)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)

    def settle(self) -> None:
        """Make the caller's stream wait for the copies back."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _staged(self, like: Tensor) -> Tensor:
        return self._buffer[: like.numel() * like.element_size()].view(like.dtype)


class Allowance:
    """Bytes that may be held at once; whoever would exceed them waits, unless nothing else is held."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._held_bytes = limit_bytes, 0
        self._changed = threading.Condition()

    def take(self, count_bytes: int) -> None:
        """Hold bytes, waiting for room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held_bytes or self._held_bytes + count_bytes <= self._limit_bytes)
            self._held_bytes += count_bytes

    def give(self, count_bytes: int) -> None:
        """Hold them no longer."""
        with self._changed:
            self._held_bytes -= count_bytes
            self._changed.notify_all()


class Lanes:
    """Run work on chunks in threads, a lane each; the order between chunks is free.

    Args:
        buffer_bytes: of the largest chunk.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._device = device
        self._lanes: list[Lane] = [
            PinnedLane(device, buffer_bytes) if device.type == "cuda" else HostLane() for _ in range(LANES)
        ]
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in self._lanes:
            self._free.put(lane)
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix="longspan-lane")
        self._started: list[Future[None]] = []
        self.computing = threading.Lock()
        """Held while a lane computes: one computation at a time has all the cores."""

    def ready(self) -> torch.cuda.Event | None:
        """Mark this point of the caller's stream: what it has run until now is there to read, and has been read."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def start(self, work: Callable[[Lane], None]) -> None:
        """Run work in a thread, soon."""
        self._started.append(self._threads.submit(self._run, work))

    def finish(self) -> None:
        """Wait for all work, and raise what the first of it that failed raised."""
        started, self._started = self._started, []
        errors = [error for error in (future.exception() for future in started) if error is not None]
        for lane in self._lanes:
            lane.settle()
        if errors:
            raise errors[0]

    def _run(self, work: Callable[[Lane], None]) -> None:
        lane = self._free.get()
        try:
            with torch.no_grad():  # each thread has its own grad mode
                work(lane)
        finally:
            self._free.put(lane)

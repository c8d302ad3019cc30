"""Memory outside the GPU that is handed out as tensors and comes back when these die."""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ConfigError, TrainingError

_ALIGNMENT = 64
_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts


class FreeList:
    """Which bytes of a range are in use: first fit, neighbours that are free become one.

    Args:
        capacity: bytes in all; None for as many as are asked for.
    """

    def __init__(self, capacity: int | None, alignment: int = _ALIGNMENT) -> None:
        self.capacity, self.alignment = capacity, alignment
        self.used = 0
        self.end = 0  # nothing was ever in use from here on
        self.holes: list[tuple[int, int]] = []  # (start, stop), ascending, never adjacent, never reaching `end`

    def take(self, size: int) -> int | None:
        """Return where `size` bytes, rounded up to the alignment, begin; None if there is no room in one piece."""
        size = aligned(size, self.alignment)
        for index, (start, stop) in enumerate(self.holes):
            if stop - start >= size:
                self.holes[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                self.used += size
                return start
        if self.capacity is not None and self.end + size > self.capacity:
            return None
        start, self.end, self.used = self.end, self.end + size, self.used + size
        return start

    def give(self, start: int, size: int) -> None:
        """Take back what `take` returned for `size` bytes."""
        stop = start + aligned(size, self.alignment)
        self.used -= stop - start
        insort(self.holes, (start, stop))
        at = self.holes.index((start, stop))
        first, last = at, at
        if at > 0 and self.holes[at - 1][1] == start:
            first = at - 1
        if at + 1 < len(self.holes) and self.holes[at + 1][0] == stop:
            last = at + 1
        self.holes[first : last + 1] = [(self.holes[first][0], self.holes[last][1])]
        if self.holes[-1][1] == self.end:
            self.end = self.holes.pop()[0]


def aligned(size: int, alignment: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-size // alignment) * alignment


class HostMemory:
    """One mapping of host memory, pinned for a GPU portion by portion as it comes into use.

    Pinning keeps the host for about 0.23 s per GiB (0.43 where there are no huge pages) and is not undone while the
    mapping lives, so a training run pays once for the most it ever used.

    Args:
        portion: bytes pinned at a time.
    """

    def __init__(self, size: int, device: torch.device, portion: int = 1 << 30) -> None:
        self.size, self.device, self.portion = size, device, portion
        try:
            self.map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"This machine does not give out {size / 2**30:.2f} GiB of host memory: {error}."
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a hint, for kernels that know it: fewer pages to pin
                self.map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self.pinned: set[int] = set()
        weakref.finalize(self, _unpin, self.map, self.address, self.pinned, portion, device).atexit = False

    def pin(self, start: int, stop: int) -> None:
        """Make copies to and from these bytes run beside the host; nothing to do on CPUs."""
        if self.device.type != "cuda":
            return
        for number in range(start // self.portion, -(-stop // self.portion)):
            if number in self.pinned:
                continue
            begin = number * self.portion
            size = min(self.portion, self.size - begin)
            with torch.cuda.device(self.device):
                code = int(_cudart().cudaHostRegister(self.address + begin, size, _PORTABLE))
            if code:
                raise ConfigError(
                    f"CUDA does not pin {size / 2**30:.2f} GiB of host memory beyond {begin / 2**30:.2f} GiB (error "
                    f"{code}): lower host_bytes, or raise what this process may lock."
                )
            self.pinned.add(number)

    def cut(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Divide a range where pinned portions meet, which one copy must not cross."""
        while start < stop:
            end = min(stop, (start // self.portion + 1) * self.portion)
            yield start, end
            start = end


def _unpin(mapping: mmap.mmap, address: int, pinned: set[int], portion: int, device: torch.device) -> None:
    """Undo all pinning; as it holds `mapping`, before the memory goes."""
    if pinned:
        torch.cuda.synchronize(device)  # copies under way
    for number in pinned:
        _cudart().cudaHostUnregister(address + number * portion)


def _cudart() -> Any:
    return torch.cuda.cudart()


class Region:
    """A range of an arena that holds one tensor.

    Args:
        buffer: what the tensor was made of, and all that keeps the range in use.
    """

    def __init__(self, start: int, size: int, buffer: mmap.mmap | memoryview) -> None:
        self.start, self.stop = start, start + size
        self._buffer = weakref.ref(buffer)

    @property
    def alive(self) -> bool:
        """Whether the tensor lives."""
        return self._buffer() is not None

    def watch(self, died: Callable[[], object]) -> None:
        """Have something called once the tensor has died, in whatever thread."""
        weakref.finalize(self._buffer(), died).atexit = False


Taken = list[tuple[Tensor, Region]]


class Arena(ABC):
    """Hands out memory as tensors, and takes it back once they have died.

    Tensors die anywhere, in any thread, so they only leave word; the next who takes memory collects it.
    """

    def __init__(self, space: FreeList) -> None:
        self.space = space
        self._dead: deque[tuple[int, int]] = deque()

    @abstractmethod
    def take(self, tensors: Sequence[Tensor]) -> Taken | None:
        """Return tensors on the host of the same shapes and types, contiguous; None if there is no room."""

    def collect(self) -> None:
        """Take back the memory of tensors that have died."""
        while self._dead:
            self.space.give(*self._dead.popleft())

    def used(self) -> int:
        """Return the bytes in use."""
        self.collect()
        return self.space.used

    def _watch(self, buffer: mmap.mmap | memoryview, start: int, size: int, kept_alive: object) -> None:
        weakref.finalize(buffer, _leave_word, self._dead, start, size, kept_alive).atexit = False


def _leave_word(dead: deque[tuple[int, int]], start: int, size: int, kept_alive: object) -> None:
    dead.append((start, size))


class HostArena(Arena):
    """Host memory for tensors on their way from forward to backward, reused for all steps and lengths."""

    def __init__(self, capacity: int, device: torch.device, portion: int = 1 << 30) -> None:
        super().__init__(FreeList(capacity))
        self.memory = HostMemory(capacity, device, portion)

    def take(self, tensors: Sequence[Tensor]) -> Taken | None:
        """Return pinned tensors like these, each in a range of its own; None if there is no room."""
        self.collect()
        taken: Taken = []
        for like in tensors:
            start = self.space.take(like.nbytes)
            if start is None:
                return None
            buffer = memoryview(self.memory.map)[start : start + like.nbytes]
            self._watch(buffer, start, like.nbytes, self.memory)
            self.memory.pin(start, start + like.nbytes)
            tensor = torch.frombuffer(buffer, dtype=like.dtype).view(like.shape)
            taken.append((tensor, Region(start, like.nbytes, buffer)))
        return taken


class FileArena(Arena):
    """A file without a name, gone with the process, for what does not fit in host memory.

    Its tensors are mapped from the file, so whoever reads one reads what was written there. Room on the disk is
    reserved before anything is written.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(FreeList(None, mmap.ALLOCATIONGRANULARITY))
        self.directory = directory
        try:
            self.file = tempfile.TemporaryFile(prefix="longspan-", dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"No file for kept tensors can be made in the directory {directory}: {error}.") from error
        self.reserved = 0

    def take(self, tensors: Sequence[Tensor]) -> Taken:
        """Return tensors like these, all in one range of the file: a mapping costs a file descriptor.

        Raises:
            TrainingError: the disk is full.
        """
        self.collect()
        offsets = list(itertools.accumulate((aligned(t.nbytes, _ALIGNMENT) for t in tensors), initial=0))
        size = offsets.pop()
        start = self.space.take(size)
        assert start is not None
        try:
            self._reserve()
            buffer = mmap.mmap(self.file.fileno(), size, flags=mmap.MAP_SHARED, offset=start)
        except OSError as error:
            self.space.give(start, size)
            raise TrainingError(
                f"The directory {self.directory} does not take {size / 2**30:.3f} GiB more of kept tensors ({error}): "
                "make room there, name another directory, or raise host_bytes."
            ) from error
        self._watch(buffer, start, size, self.file)
        return [
            (
                torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=at).view(like.shape),
                Region(start + at, like.nbytes, buffer),
            )
            for at, like in zip(offsets, tensors, strict=True)
        ]

    def _reserve(self) -> None:
        more = self.space.end - self.reserved
        if more > 0:
            os.posix_fallocate(self.file.fileno(), self.reserved, more)
            self.reserved += more

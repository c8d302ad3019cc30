"""Host memory for tensors of a device: buffers that fit any length, and copies to them and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longspan.errors import ConfigError

_CHUNK_BYTES = 1 << 26
"""Pinned memory comes in powers of two: whole chunks waste nothing, and a longer sequence adds chunks to a buffer."""


@dataclass(frozen=True)
class Layout:
    """What a tensor must be made of to be as it was: views of its copies work as those of itself did.

    Args:
        stride: of a copy without gaps, its dims in the same order in memory.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Describe a tensor whose elements do not share memory."""
        return cls(tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.shape.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Make a tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Buffer:
    """Host memory for one tensor at a time, made of chunks."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.chunks: list[Tensor] = []
        self.used: Any = None  # when the last copy from or to it is done

    @property
    def nbytes(self) -> int:
        """Bytes it can hold."""
        return sum(len(chunk) for chunk in self.chunks)

    def grow(self, nbytes: int, allocate: Callable[[int], Tensor]) -> None:
        """Add chunks until it can hold so many bytes."""
        while (missing := nbytes - self.nbytes) > 0:
            self.chunks.append(allocate(min(_CHUNK_BYTES, 1 << (missing - 1).bit_length())))

    def save(self, source: Tensor) -> None:
        """Copy a tensor into it."""
        if torch.empty_like(source, device="meta").stride() != source.stride():
            source = source.clone(memory_format=torch.preserve_format)  # close its gaps
        for chunk, part in self._pairs(source):
            chunk.copy_(part, non_blocking=True)

    def load(self, target: Tensor) -> None:
        """Copy a tensor of the layout that was saved out of it."""
        for chunk, part in self._pairs(target):
            part.copy_(chunk, non_blocking=True)

    def _pairs(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair the bytes of a tensor without gaps, as they lie in memory, with those of the chunks."""
        rest = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        for chunk in self.chunks:
            if not len(rest):
                return
            part, rest = rest[: len(chunk)], rest[len(chunk) :]
            yield chunk[: len(part)], part


class Pool:
    """Idle buffers, kept for the next tensor whatever its length.

    Args:
        count: buffers that are kept.
        pin: whether memory for tensors of other devices than the CPU is pinned.
        allocate: makes a chunk of so many bytes, pinned if the second argument says so.
    """

    def __init__(self, count: int, pin: bool, allocate: Callable[[int, bool], Tensor] | None = None) -> None:
        self.count, self.pin = count, pin
        self.allocate = allocate or _allocate
        self.idle: list[Buffer] = []

    def take(self, nbytes: int, device: torch.device) -> Buffer:
        """Return a buffer for so many bytes of a device: the smallest that holds them, or the largest, made larger."""
        pinned = self.pin and device.type != "cpu"
        alike = [buffer for buffer in self.idle if buffer.pinned == pinned]
        fitting = [buffer for buffer in alike if buffer.nbytes >= nbytes]
        buffer = min(fitting, key=_size) if fitting else max(alike, key=_size, default=None)
        if buffer is None:
            buffer = Buffer(pinned)
        else:
            self.idle.remove(buffer)
        buffer.grow(nbytes, lambda chunk_bytes: self._checked(chunk_bytes, pinned))
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back; beyond the count it is freed."""
        if len(self.idle) < self.count:
            self.idle.append(buffer)

    def _checked(self, nbytes: int, pinned: bool) -> Tensor:
        chunk = self.allocate(nbytes, pinned)
        if pinned and not chunk.is_pinned():
            raise ConfigError(
                "Host memory was asked to be pinned and is not known to the device, so copies would wait for it: use "
                "an allocator that registers its memory (with DeepSpeed, unset DS_PIN_MEMORY_BACKEND or set it to "
                "torch), or use_pin_memory=False."
            )
        return chunk


class Copier(Protocol):
    """Copies tensors of one device to the host and back."""

    def save(self, source: Tensor, buffer: Buffer) -> Any:
        """Start to copy to the host; return what `wait` takes. The source must live until then."""
        ...

    def fetch(self, buffer: Buffer, layout: Layout) -> tuple[Tensor, Any]:
        """Start to copy back; return the tensor and what `wait` takes."""
        ...

    def wait(self, done: Any) -> None:
        """Let the work that follows on the current stream happen after a copy."""
        ...

    def abandon(self, target: Tensor) -> None:
        """Let a tensor go whose copy nobody waited for."""
        ...


class HostCopier:
    """Copies tensors of the CPU itself, at once."""

    def save(self, source: Tensor, buffer: Buffer) -> None:
        """See `Copier`."""
        buffer.save(source)

    def fetch(self, buffer: Buffer, layout: Layout) -> tuple[Tensor, None]:
        """See `Copier`."""
        target = layout.empty()
        buffer.load(target)
        return target, None

    def wait(self, done: None) -> None:
        """See `Copier`."""

    def abandon(self, target: Tensor) -> None:
        """See `Copier`."""


class StreamCopier:
    """Copies on a stream of a device.

    Args:
        beside: whether that is a stream of its own, next to the computation, or the computation's.
    """

    def __init__(self, device: torch.device, beside: bool) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.stream = self.module.Stream(device) if beside else None

    def save(self, source: Tensor, buffer: Buffer) -> Any:
        """See `Copier`."""
        return self._run(buffer, lambda: buffer.save(source))

    def fetch(self, buffer: Buffer, layout: Layout) -> tuple[Tensor, Any]:
        """See `Copier`."""
        # Made on the current stream, where it is used and freed, after whatever had this memory before.
        target = layout.empty()
        return target, self._run(buffer, lambda: buffer.load(target))

    def wait(self, done: Any) -> None:
        """See `Copier`."""
        self.module.current_stream(self.device).wait_event(done)

    def abandon(self, target: Tensor) -> None:
        """See `Copier`."""
        if self.stream is not None:
            target.record_stream(self.stream)

    def _run(self, buffer: Buffer, copy: Callable[[], None]) -> Any:
        current = self.module.current_stream(self.device)
        stream = self.stream or current
        stream.wait_stream(current)
        if buffer.used is not None:
            stream.wait_event(buffer.used)
        with self.module.stream(stream):
            copy()
        buffer.used = stream.record_event()
        return buffer.used


def copier_for(device: torch.device, beside: bool) -> Copier:
    """Return what copies tensors of a device; see `StreamCopier`."""
    return HostCopier() if device.type == "cpu" else StreamCopier(device, beside)


def _allocate(nbytes: int, pinned: bool) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _size(buffer: Buffer) -> int:
    return buffer.nbytes

"""A stream that copies as late as it may, and notices memory that was let go before."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from longspan.stream.stores import Lane


class _Part:
    """A tensor of bytes that is not kept alive."""

    def __init__(self, t: Tensor) -> None:
        self.ref, self.offset, self.size = StorageWeakRef(t.untyped_storage()), t.storage_offset(), t.numel()

    def tensor(self) -> Tensor:
        assert not self.ref.expired(), "memory was let go before its copy was done"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.offset, (self.size,))  # type: ignore[call-overload]


class LazyLane(Lane):
    """Does each copy when somebody waits for it or for a later one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.turn = threading.Lock()
        self.queue: list[tuple[Any, list[tuple[_Part, _Part]]]] = []

    def join(self, done: Any) -> None:
        if done is not None:
            done.synchronize()

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Any) -> Any:
        done = _Done(self)
        with self.turn:
            self.queue.append((done, [(_Part(target), _Part(source)) for target, source in pairs]))
        return done


class _Done:
    def __init__(self, lane: LazyLane) -> None:
        self.lane = lane

    def synchronize(self) -> None:
        with self.lane.turn:  # a file's thread and the main thread wait on one lane
            while any(done is self for done, _ in self.lane.queue):
                for target, source in self.lane.queue.pop(0)[1]:
                    target.tensor().copy_(source.tensor())

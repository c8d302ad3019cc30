"""Where kept tensors live between forward and backward: on the GPU, in host memory, or in a file."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ConfigError, ModelError
from longspan.keep import Budget
from longspan.plan.kept import Tier, too_much
from longspan.stream.arena import FileArena, HostArena, Region
from longspan.stream.stores import Copying, FileStore, HostStore, Store

MOVING = "moving"


@dataclass
class Usage:
    """Bytes of kept tensors in each tier, now and at most; `moving` are held on the GPU for copies out and in."""

    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*Tier, MOVING), 0))
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*Tier, MOVING), 0))

    def record(self, what: str, count: int) -> None:
        """Record the bytes now."""
        self.now[what] = count
        self.peak[what] = max(self.peak[what], count)


@dataclass(frozen=True)
class _Place:
    """Where the tensor is that another stands for."""

    store: Store
    region: Region
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Leaving:
    """Tensors on their way out, and how often they had been written to when they set off."""

    tensors: list[Tensor]
    versions: list[int]
    copying: Copying

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class _Coming:
    """A tensor on its way in."""

    tensor: Tensor
    region: Region
    copying: Copying


class Stash:
    """Holds tensors in the tier they are put in, and brings them back.

    A tensor that leaves the GPU is stood for by one in host memory, or mapped from the file, which can be kept wherever
    a tensor can; once that one dies its memory is used again. Copies run on a stream of their own and are ordered by
    events. What leaves is let go when the next layer's is put: by then its copy had a layer's time, and the GPU, not
    the host, waits for it. Only the file's thread keeps the host waiting, if the file is slow.

    Cost: of the host's time, what the tensors at hand take, however many others are held: what dies leaves word.

    Args:
        portion: bytes of host memory pinned at a time; `chunk` of each buffer in front of the file.
    """

    def __init__(self, device: torch.device, budget: Budget, portion: int = 1 << 30, chunk: int = 1 << 26) -> None:
        self.device, self.budget, self._sizes = device, budget, (portion, chunk)
        self._stores: dict[Tier, Store] = {}
        if budget.host_bytes:
            self._stores[Tier.HOST] = HostStore(HostArena(budget.host_bytes, device, portion), device)
        if budget.directory is not None:
            self._stores[Tier.FILE] = FileStore(FileArena(budget.directory), device, chunk)
        self.products: dict[int, float] = {}  # bytes per token of the products that each layer keeps, once known
        self.states: tuple[int, torch.dtype, torch.dtype | None] | None = None  # width, type, autocast's; once known
        self._closed: dict[Tier, Store] = {}  # that tensors still lie in
        self._usage = Usage()
        self._storages: dict[int, int] = {}  # bytes of each on the device
        self._places: dict[int, _Place] = {}  # by the address of the tensor that stands for it
        self._dead_storages: deque[int] = deque()  # tensors die anywhere, in any thread
        self._dead_places: deque[int] = deque()
        self._held_bytes = self._moving_bytes = 0
        self._leaving: deque[_Leaving] = deque()
        self._coming: dict[int, _Coming] = {}  # by the same address

    def __deepcopy__(self, memo: dict[int, Any]) -> Stash:
        return Stash(self.device, self.budget, *self._sizes)

    @property
    def usage(self) -> Usage:
        """Bytes now and at most."""
        self._measure()
        return self._usage

    def left(self) -> Budget:
        """Return what of the budget is not in use."""
        now, budget = self.usage.now, self.budget
        gpu = None if budget.gpu_bytes is None else max(0, budget.gpu_bytes - now[Tier.GPU])
        return replace(budget, gpu_bytes=gpu, host_bytes=max(0, budget.host_bytes - now[Tier.HOST]))

    def reserve(self, host_bytes: int) -> None:
        """Pin so much host memory, which is used first, before it is needed. Cost: see `HostMemory`; nothing on CPUs.

        Raises:
            ConfigError: the budget has less, or CUDA does not pin it.
        """
        if host_bytes > self.budget.host_bytes:
            raise ConfigError(f"{host_bytes:,} bytes are more than host_bytes={self.budget.host_bytes:,}.")
        store = self._stores.get(Tier.HOST)
        if isinstance(store, HostStore):
            store.memory.pin(0, host_bytes)

    def put(self, tensors: Sequence[Tensor], tier: Tier) -> tuple[Tensor, ...]:
        """Return tensors that stand for these; those that leave the GPU must not be written to any more.

        Args:
            tier: where they go; where it has no room, to a slower one, and then to a faster one.

        Raises:
            ConfigError: no tier has room.
            TrainingError: the disk is full, or a write failed.
        """
        self.settle()
        order = list(Tier)[list(Tier).index(tier) :] + list(Tier)[: list(Tier).index(tier)][::-1]
        detached = [t.detach() for t in tensors]
        stood = self._somewhere(detached, order)
        if stood is None:  # together they fit nowhere
            stood = self._divided(detached, order)
        self._measure()
        return tuple(stood)

    def _somewhere(self, tensors: list[Tensor], order: Sequence[Tier]) -> list[Tensor] | None:
        """Put tensors into the first tier that has room for all of them."""
        for choice in order:
            stood = self._stay(tensors) if choice is Tier.GPU else self._leave(tensors, choice)
            if stood is not None:
                return stood
        return None

    def _divided(self, tensors: list[Tensor], order: Sequence[Tier]) -> list[Tensor]:
        """Put each tensor, with those that share its memory, into the first tier that has room for it."""
        lots: dict[int, list[int]] = {}
        for position, t in enumerate(tensors):
            lots.setdefault(t.untyped_storage()._cdata, []).append(position)
        stood = list(tensors)
        for positions in lots.values():
            lot = [tensors[position] for position in positions]
            found = self._somewhere(lot, order)
            if found is None:
                raise ConfigError(too_much(sum(t.nbytes for t in lot), self.left()))
            for position, stands in zip(positions, found, strict=True):
                stood[position] = stands
        return stood

    def get(self, stood: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what these stand for, on the device."""
        self._fetch(self._found(stood))
        return tuple(self._arrive(t) for t in stood)

    def away(self, stood: Tensor) -> bool:
        """Whether a tensor stands for one that has left the device: `get` then makes one that nobody else holds."""
        return self._place(stood) is not None

    def fetcher(self, stood: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that starts bringing back what these stand for, for `get` to find, if there is room for it;
        it keeps none alive."""
        return partial(self._fetch, self._found(stood), early=True)

    def settle(self) -> None:
        """Let go of what has left, once it has, and of what came in for nobody."""
        while self._leaving:
            self._let_go()
        for address in [a for a, coming in self._coming.items() if not coming.region.alive]:
            self._arrived(address)

    def finish(self) -> None:
        """Let the host wait until all that leaves has left, so that anybody may read it there."""
        for item in self._leaving:
            item.copying.finish()

    def close(self) -> None:
        """Give back host memory and the file as soon as no tensor needs them; what is put from now on stays."""
        self.settle()
        self._closed |= self._stores
        self._stores = {}
        self.budget = Budget()
        self._collect()  # with tensors that have died, the memory that they were in

    def _let_go(self) -> None:
        """Let go of what left first, once it has."""
        item = self._leaving.popleft()
        self._moving_bytes -= item.nbytes
        item.copying.join()
        if item.versions != [t._version for t in item.tensors]:
            raise ModelError(
                "Hidden states were changed in place after a layer had run on them, while they were being copied; "
                "let layers keep them on the GPU, or change a copy."
            )

    def _arrived(self, address: int) -> Tensor:
        """Return what came in for a tensor, which it is no longer held for."""
        coming = self._coming.pop(address)
        self._moving_bytes -= coming.tensor.nbytes
        coming.copying.join()  # before its memory goes
        return coming.tensor

    def _stay(self, tensors: list[Tensor]) -> list[Tensor] | None:
        self._collect()
        storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors) if s._cdata not in self._storages}
        if self.budget.gpu_bytes is not None:
            more, left = sum(s.nbytes() for s in storages.values()), self.left().gpu_bytes
            if left is not None and more > left:
                return None
        for key, storage in storages.items():  # a storage's object in Python lives as long as the storage
            weakref.finalize(storage, self._dead_storages.append, key).atexit = False
            self._storages[key] = storage.nbytes()
            self._held_bytes += storage.nbytes()
        return tensors

    def _leave(self, tensors: list[Tensor], tier: Tier) -> list[Tensor] | None:
        full, store = [t for t in tensors if t.numel()], self._stores.get(tier)
        if not full:
            return tensors
        taken = store.arena.take(full) if store else None
        if store is None or taken is None:
            return None
        sources = [t.contiguous() for t in full]
        limit = self.budget.moving_bytes
        lots = [slice(None)] if limit is None else [slice(i, i + 1) for i in range(len(full))]
        for lot in lots:
            copying = store.leave(sources[lot], [region for _, region in taken[lot]])
            self._leaving.append(_Leaving(sources[lot], [t._version for t in sources[lot]], copying))
            self._moving_bytes += self._leaving[-1].nbytes
        del full, sources
        while limit is not None and self._leaving and self._moving_bytes > limit:
            self._let_go()
        for stand_in, region in taken:
            self._places[stand_in.data_ptr()] = _Place(store, region, stand_in.dtype, stand_in.shape)
            region.watch(partial(self._dead_places.append, stand_in.data_ptr()))
        rest = iter(stand_in for stand_in, _ in taken)
        return [next(rest) if t.numel() else t for t in tensors]

    def _found(self, stood: Sequence[Tensor]) -> dict[int, _Place]:
        return {t.data_ptr(): place for t in stood if (place := self._place(t)) is not None}

    def _place(self, t: Tensor) -> _Place | None:
        place = self._places.get(t.data_ptr())
        return place if place is not None and place.region.alive and t.device.type == "cpu" else None

    def _fetch(self, places: dict[int, _Place], early: bool = False) -> None:
        stores: dict[Store, list[tuple[int, _Place]]] = {}
        for address, place in places.items():
            known = self._coming.get(address)
            if place.region.alive and (known is None or known.region is not place.region):
                stores.setdefault(place.store, []).append((address, place))
        if not stores:
            return
        limit = self.budget.moving_bytes
        size = sum(place.nbytes for wanted in stores.values() for _, place in wanted)
        if early and limit is not None and self._moving_bytes + size > limit:
            return
        for store, wanted in stores.items():
            targets = [torch.empty(place.shape, dtype=place.dtype, device=self.device) for _, place in wanted]
            copying = store.come(targets, [place.region for _, place in wanted])
            for (address, place), target in zip(wanted, targets, strict=True):
                if address in self._coming:
                    self._arrived(address)
                self._coming[address] = _Coming(target, place.region, copying)
                self._moving_bytes += target.nbytes
        self._measure()

    def _arrive(self, stood: Tensor) -> Tensor:
        if self._place(stood) is None:
            return stood if stood.device.type == self.device.type else stood.to(self.device)  # a hook's copy
        return self._arrived(stood.data_ptr())

    def _collect(self) -> None:
        """Forget tensors that have died, and closed stores that no other lies in."""
        while self._dead_storages:
            self._held_bytes -= self._storages.pop(self._dead_storages.popleft())
        while self._dead_places:
            address = self._dead_places.popleft()
            if address in self._places and not self._places[address].region.alive:  # else another lies there by now
                del self._places[address]
        if not self._places:
            self._closed.clear()

    def _measure(self) -> None:
        self._collect()
        self._usage.record(Tier.GPU, self._held_bytes)
        stores = self._closed | self._stores
        for tier in (Tier.HOST, Tier.FILE):
            self._usage.record(tier, stores[tier].arena.used() if tier in stores else 0)
        self._usage.record(MOVING, self._moving_bytes)

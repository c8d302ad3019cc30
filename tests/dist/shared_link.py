"""A link between the processes of the pool: buffers in files that all of them map; nothing is left to a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.copy_engine import CopyEngine
from longspan.comm.link import Copy, Slots
from longspan.mesh import Axis, Mesh


class SharedLink:
    """See `longspan.comm.link.Link`; what is queued is done at once, and marks mean nothing."""

    def __init__(self, axis: Axis, folder: str) -> None:
        self.axis, self.size, self.rank, self.folder = axis, axis.size, axis.rank, folder
        self.allocated: list[int] = []
        self.copied = self.met = 0

    def allocate(self, count: int, slot_bytes: int) -> Slots:
        """Return slots of which the next one is spoiled whenever one is taken: from then on others may write there."""
        name = f"{'-'.join(map(str, self.axis.ranks))}.{len(self.allocated)}"
        self.allocated.append(slot_bytes)
        files = [Path(self.folder) / f"{name}.{rank}" for rank in range(self.size)]
        files[self.rank].write_bytes(bytes(count * slot_bytes))
        dist.barrier(self.axis.group)
        whole = [torch.from_file(str(file), shared=True, size=count * slot_bytes, dtype=torch.uint8) for file in files]
        return Spoiled([memory.view(count, -1).unbind() for memory in whole], self.rank)

    def ready(self) -> None:
        pass

    def push(self, after: Sequence[None], copies: Sequence[Copy]) -> None:
        for to, source in copies:
            to.copy_(source)

    def meet(self, after: Sequence[None]) -> None:
        dist.barrier(self.axis.group)
        self.met += 1

    def copy(self, after: Sequence[None], copies: Sequence[Copy]) -> None:
        for to, source in copies:
            to.copy_(source)
        self.copied += 1

    def wait(self, mark: None) -> None:
        pass

    def passed(self, mark: None) -> bool:
        return True


class Spoiled(Slots):
    """Slots whose content is gone as early as it may be."""

    def __init__(self, buffers: Sequence[Sequence[Tensor]], rank: int) -> None:
        super().__init__(buffers)
        self.own = buffers[rank]

    def take(self) -> int:
        number = super().take()
        self.own[self.turn % self.count].fill_(255)  # NaN in every floating type
        return number


def equipped(mesh: Mesh, folder: str, slot_bytes: int = 32768, lent_bytes: int = 2**20) -> Mesh:
    """Let the Ulysses axis of a mesh exchange over shared files."""
    axis = mesh.ulysses
    if axis.size == 1:
        return mesh
    copier = CopyEngine(SharedLink(axis, folder), slot_bytes, lent_bytes)
    return replace(mesh, ulysses=replace(axis, copier=copier))

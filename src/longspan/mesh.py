"""The process groups of sequence parallelism: ring x ulysses inside the data-parallel mesh of the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.errors import TopologyError
from longspan.plan.degrees import Degrees
from longspan.stopwatch import Stopwatch

if TYPE_CHECKING:
    from longspan.comm.copy_engine import CopyEngine


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this process sees it.

    `ranks` are global; `group` is None when the axis has one rank. With a `copier`, heads are exchanged by copy engines
    in place of collectives. `waits` counts, while it runs, how long compute stands still for what other ranks send.
    """

    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    copier: CopyEngine | None = field(default=None, compare=False, repr=False)
    waits: Stopwatch = field(default_factory=Stopwatch, compare=False, repr=False)

    def peer(self, offset: int) -> int:
        """Return the global rank of the neighbour `offset` steps further on, around the ring."""
        return self.ranks[(self.rank + offset) % self.size]

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self


@dataclass(frozen=True)
class Mesh:
    """Axes of one prepared model.

    `sequence` joins ring and ulysses (ring-major), `data` holds the ranks with the same part of other batches, `world`
    joins all of them: over it gradients are reduced and parameters may be sharded.
    """

    ring: Axis = Axis()
    ulysses: Axis = Axis()
    sequence: Axis = Axis()
    data: Axis = Axis()
    world: Axis = Axis()
    device_type: str = "cpu"

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self


def data_parallel_ranks(sequence_parallel_size: int, host: DeviceMesh | None) -> torch.Tensor:
    """Return the global ranks as [dp, sp], from the host's mesh or from all processes.

    Args:
        host: a mesh with an axis named `sp` or `cp`; every other axis is data parallel.

    Raises:
        TopologyError: the processes cannot be divided as asked.
    """
    size = sequence_parallel_size
    if size < 1:
        raise TopologyError(f"sequence_parallel_size must be at least 1, got {size}.")
    if not dist.is_available() or not dist.is_initialized():
        if size > 1:
            raise TopologyError(
                f"sequence_parallel_size {size} needs {size} processes, but torch.distributed is not initialised. "
                "Start with torchrun and call torch.distributed.init_process_group first."
            )
        return torch.zeros(1, 1, dtype=torch.long)
    if host is not None:
        return _host_ranks(host, size)
    world = dist.get_world_size()
    if world % size:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        raise TopologyError(
            f"sequence_parallel_size {size} does not divide the {world} processes; use one of {divisors}, "
            f"or start a multiple of {size} processes."
        )
    return torch.arange(world).view(-1, size)


def build_mesh(ranks: torch.Tensor, degrees: Degrees, device_type: str) -> Mesh:
    """Create the process groups. Cost: collective over the default group; call it on every process.

    Args:
        ranks: global ranks as [dp, sp].

    Raises:
        TopologyError: this process is not among them; the groups exist all the same, so that nobody waits.
    """
    if ranks.numel() == 1:
        return Mesh(device_type=device_type)
    grid = ranks.view(-1, degrees.ring, degrees.ulysses)
    inner = DeviceMesh(device_type, grid, mesh_dim_names=("data", "ring", "ulysses"))
    outer = DeviceMesh(device_type, ranks.contiguous(), mesh_dim_names=("replica", "sequence"))
    world = DeviceMesh(device_type, ranks.flatten(), mesh_dim_names=("world",))
    if dist.get_rank() not in ranks:
        raise TopologyError(
            f"Process {dist.get_rank()} is not part of the mesh of processes {sorted(ranks.flatten().tolist())}, so it "
            "has no share of the model's work."
        )
    waits = Stopwatch(device_type)  # one for all axes: their exchanges serve the same attention
    return Mesh(
        ring=_axis(inner, "ring", waits),
        ulysses=_axis(inner, "ulysses", waits),
        sequence=_axis(outer, "sequence", waits),
        data=_axis(inner, "data", waits),
        world=_axis(world, "world", waits),
        device_type=device_type,
    )


def device_type() -> str:
    """Return the kind of device whose tensors the processes exchange, or that one process alone would use."""
    exchanges = not dist.is_available() or not dist.is_initialized() or dist.get_backend() != "gloo"
    return "cuda" if torch.cuda.is_available() and exchanges else "cpu"


def _axis(mesh: DeviceMesh, name: str, waits: Stopwatch) -> Axis:
    sub = mesh[name]
    ranks = tuple(sub.mesh.flatten().tolist())
    if len(ranks) == 1:
        return Axis(ranks=ranks, waits=waits)
    return Axis(len(ranks), ranks.index(dist.get_rank()), ranks, mesh.get_group(name), waits=waits)


def _host_ranks(host: DeviceMesh, size: int) -> torch.Tensor:
    names = host.mesh_dim_names or ()
    found = [name for name in names if name in ("sp", "cp")]
    if len(found) != 1:
        raise TopologyError(f"The mesh needs exactly one axis named 'sp' or 'cp', it has {list(names)}.")
    whole = host._get_root_mesh() if hasattr(host, "_get_root_mesh") else host
    if whole.mesh.numel() > host.mesh.numel():
        raise TopologyError(
            f"The mesh {list(names)} is a part of a mesh {list(whole.mesh_dim_names or ())}: pass the whole one, so "
            "that longspan knows which processes hold other batches."
        )
    axis = names.index(found[0])
    if host.mesh.shape[axis] != size:
        raise TopologyError(
            f"The mesh's axis '{found[0]}' has {host.mesh.shape[axis]} ranks, sequence_parallel_size is {size}."
        )
    return host.mesh.movedim(axis, -1).reshape(-1, size).cpu()

"""The mesh that `attend` works over, for models that `prepare` does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longspan.agreement import decide_together
from longspan.comm.symmetric import with_copy_engine
from longspan.errors import ConfigError, TopologyError
from longspan.mesh import Mesh, build_mesh, data_parallel_ranks, device_type
from longspan.plan.degrees import Degrees, choose_degrees


def make_mesh(
    sequence_parallel_size: int,
    *,
    heads: int,
    kv_heads: int | None = None,
    ulysses_degree: int | None = None,
    ring_degree: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Mesh:
    """Make the process groups over which `longspan.attend` divides sequences; once, on every process.

    Neighbouring ranks share a sequence, `mesh.sequence`; ranks with other batches are `mesh.data`, all of them
    `mesh.world`. What a rank holds of a row is `Layout(tokens, mesh.ring.size, mesh.ulysses.size)` at
    `mesh.sequence.rank`.

    Args:
        sequence_parallel_size: ranks that share a sequence; the other ranks are data parallel.
        heads, kv_heads: query and KV heads of the model's attention; None for as many KV heads as query heads.
        ulysses_degree, ring_degree: how the ranks divide into head and ring parallelism; None to choose.
        mesh: a mesh of the host with an axis named `sp` or `cp`; None for all processes.

    Raises:
        ConfigError: an argument that is no whole number, or no mesh.
        TopologyError: processes or heads cannot serve the degrees; another process raised, or came to other degrees.

    Cost: an all-gather of objects, and process groups; on GPUs of one node a quarter of a GiB of each for exchanges of
        heads by copy engines.
    """
    kind = mesh.device_type if isinstance(mesh, DeviceMesh) else device_type()
    node_size = torch.cuda.device_count() if kind == "cuda" else None

    def divide() -> tuple[torch.Tensor, Degrees]:
        shared_heads = heads if kv_heads is None else kv_heads
        _check(sequence_parallel_size, heads, shared_heads, ulysses_degree, ring_degree, mesh)
        ranks = data_parallel_ranks(sequence_parallel_size, mesh)
        chosen = choose_degrees(
            heads, shared_heads, sequence_parallel_size, node_size, ulysses=ulysses_degree, ring=ring_degree
        )
        return ranks, chosen

    made, _ = with_copy_engine(build_mesh(*_agreed(divide), kind), torch.device(kind))
    return made


def _agreed(divide: Callable[[], tuple[torch.Tensor, Degrees]]) -> tuple[torch.Tensor, Degrees]:
    """Return the processes as [dp, sp] and the degrees, if all came to the same; else all raise, and nobody waits."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return divide()

    def told(divided: tuple[torch.Tensor, Degrees]) -> str:
        ranks, degrees = divided
        return f"{len(ranks)} rows at a time, ulysses {degrees.ulysses} x ring {degrees.ring}"

    divided, everyone = decide_together(divide, told, "make the mesh, so no process does")
    for rank, found in enumerate(everyone):
        if found != everyone[0]:
            raise TopologyError(
                f"Processes divide sequences differently: process 0 has {everyone[0]}, process {rank} has {found}. "
                "Give the same sizes, heads and degrees everywhere; where hosts have unlike numbers of GPUs, degrees."
            )
    return divided


def _check(size: Any, heads: Any, kv_heads: Any, ulysses: Any, ring: Any, mesh: Any) -> None:
    for name, number in (
        ("sequence_parallel_size", size),
        ("heads", heads),
        ("kv_heads", kv_heads),
        ("ulysses_degree", 1 if ulysses is None else ulysses),
        ("ring_degree", 1 if ring is None else ring),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {number!r}.")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch DeviceMesh with an axis 'sp' or 'cp', or None, got {mesh!r}.")

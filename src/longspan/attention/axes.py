"""The mesh that `attend` works over, for models that `prepare` does not know."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from longspan.comm.symmetric import with_copy_engine
from longspan.errors import ConfigError
from longspan.mesh import Mesh, build_mesh, data_parallel_ranks, device_type
from longspan.plan.degrees import choose_degrees


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
        TopologyError: processes or heads cannot serve the degrees.

    Cost: process groups; on GPUs of one node a quarter of a GiB of each for exchanges of heads by copy engines.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    for name, number in (
        ("sequence_parallel_size", sequence_parallel_size),
        ("heads", heads),
        ("kv_heads", kv_heads),
        ("ulysses_degree", 1 if ulysses_degree is None else ulysses_degree),
        ("ring_degree", 1 if ring_degree is None else ring_degree),
    ):
        _check_number(name, number)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch DeviceMesh with an axis 'sp' or 'cp', or None, got {mesh!r}.")
    kind = device_type() if mesh is None else mesh.device_type
    node_size = torch.cuda.device_count() if kind == "cuda" else None
    ranks = data_parallel_ranks(sequence_parallel_size, mesh)
    degrees = choose_degrees(
        heads, kv_heads, sequence_parallel_size, node_size, ulysses=ulysses_degree, ring=ring_degree
    )
    made, _ = with_copy_engine(build_mesh(ranks, degrees, kind), torch.device(kind))
    return made


def _check_number(name: str, number: Any) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {number!r}.")

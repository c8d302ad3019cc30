"""`longspan.make_mesh` and the page that shows it, with `attend` on models that are not Hugging Face's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import longspan
from longspan.errors import ConfigError, TopologyError
from longspan.mesh import Mesh

pytestmark = pytest.mark.dist
PAGE = Path(__file__).parents[2] / "docs" / "attend.md"


def follow_the_page() -> tuple[int, list[int]]:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, PAGE.name, "exec"), names)
    return names["mesh"].sequence.size, names["mine"]


def test_the_page_does_what_it_shows(run_ranks: Any) -> None:
    """Its own assertions compare with whole rows on one rank."""
    answers = run_ranks(2, follow_the_page)
    assert [size for size, _ in answers] == [2, 2]
    assert sorted(answers[0][1] + answers[1][1]) == list(range(1024))


def degrees(**options: Any) -> tuple[int, ...]:
    mesh = longspan.make_mesh(**options)
    return mesh.ulysses.size, mesh.ring.size, mesh.data.size, mesh.world.size, mesh.sequence.rank


def in_a_host_mesh() -> tuple[int, ...]:
    """Ranks 0 and 2 share a sequence, and 1 and 3."""
    host = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("cp", "dp"))
    mesh = longspan.make_mesh(2, heads=4, ring_degree=2, mesh=host)
    return mesh.ring.ranks


def refused() -> str:
    host = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("sp",))
    q, mask = torch.randn(1, 8, 2, 4), longspan.Mask(8)
    with pytest.raises(ConfigError, match="got DeviceMesh: make it once") as found:
        longspan.attend(q, q, q, mask, host)  # pyright: ignore[reportArgumentType]
    return str(found.value)


def test_axes(run_ranks: Any) -> None:
    assert run_ranks(4, degrees, sequence_parallel_size=4, heads=2) == [(2, 2, 1, 4, rank) for rank in range(4)]
    two = run_ranks(4, degrees, sequence_parallel_size=2, heads=4, kv_heads=1)
    assert two == [(2, 1, 2, 4, rank % 2) for rank in range(4)]
    by_hand = run_ranks(2, degrees, sequence_parallel_size=2, heads=4, ring_degree=2)
    assert by_hand == [(1, 2, 1, 2, rank) for rank in range(2)]
    assert run_ranks(4, in_a_host_mesh) == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert all("longspan.make_mesh(sequence_parallel_size, heads=" in said for said in run_ranks(2, refused))


def unlike(*options: dict[str, Any]) -> str:
    """Make a mesh of what each rank is given; return what is said."""
    with pytest.raises((ConfigError, TopologyError)) as found:
        longspan.make_mesh(**options[dist.get_rank()])
    return f"{type(found.value).__name__}: {found.value}"


def test_all_ranks_make_the_same_mesh_or_none(run_ranks: Any) -> None:
    """Else groups of one would wait for those of another."""
    two = {"sequence_parallel_size": 2, "heads": 4}
    differ = "TopologyError: Processes divide sequences differently: process 0 has {}, process 1 has {}. Give the same "
    for other, here, there in (
        ({"heads": 3}, "1 rows at a time, ulysses 2 x ring 1", "1 rows at a time, ulysses 1 x ring 2"),
        ({"sequence_parallel_size": 1}, "1 rows at a time, ulysses 2 x ring 1", "2 rows at a time, ulysses 1 x ring 1"),
    ):
        for said in run_ranks(2, unlike, two, {**two, **other}):
            assert said.startswith(differ.format(here, there))
    first, second = run_ranks(2, unlike, two, {**two, "heads": 0})
    assert second == "ConfigError: heads must be a whole number of at least 1, got 0."
    assert first == f"TopologyError: Process 1 cannot make the mesh, so no process does: {second[13:]}"


def test_one_rank_needs_no_mesh() -> None:
    q, k = torch.randn(2, 8, 4, 4), torch.randn(2, 8, 2, 4)
    mask = longspan.Mask(8)
    alone = longspan.make_mesh(1, heads=4, kv_heads=2)
    assert alone == Mesh() and not dist.is_initialized()
    assert torch.equal(longspan.attend(q, k, k, mask, None), longspan.attend(q, k, k, mask, alone))


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"sequence_parallel_size": "2"}, ConfigError, "sequence_parallel_size must be a whole number .* got '2'"),
        ({"heads": 0}, ConfigError, "heads must be a whole number of at least 1, got 0"),
        ({"kv_heads": 1.5}, ConfigError, "kv_heads must be a whole number of at least 1, got 1.5"),
        ({"ring_degree": True}, ConfigError, "ring_degree must be a whole number of at least 1, got True"),
        ({"mesh": "cuda"}, ConfigError, "mesh must be a torch DeviceMesh .* got 'cuda'"),
        ({"sequence_parallel_size": 2}, TopologyError, "needs 2 processes, but torch.distributed is not initialised"),
        ({"ulysses_degree": 2}, TopologyError, "must be sequence_parallel_size, got 2 and None for 1"),
    ],
)
def test_what_makes_no_mesh(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        longspan.make_mesh(**{"sequence_parallel_size": 1, "heads": 4, **options})

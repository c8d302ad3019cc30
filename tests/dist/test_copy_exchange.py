"""Exchanges by copies between processes: bit for bit what collectives give, and exact in attention and in layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from longspan.comm import symmetric
from longspan.comm.copy_engine import CopyEngine
from longspan.comm.exchange import to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.comm.link import Slots
from longspan.comm.symmetric import SymmetricLink, proven, with_copy_engine
from longspan.keep import Keep, Memory
from longspan.layout import Layout
from longspan.mesh import Axis, Mesh, build_mesh, data_parallel_ranks
from longspan.plan.degrees import Degrees
from models import Rows
from pool import RunRanks
from shared_link import SharedLink, equipped
from test_attend import Case, cases, errors, wrong
from test_parity import Errors, exact, worst
from test_stream import streamed_errors

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")


def mesh_of(ulysses: int, ring: int = 1) -> Mesh:
    return build_mesh(data_parallel_ranks(ulysses * ring, None), Degrees(ulysses, ring, ""), "cpu")


class Faulty(SharedLink):
    """Loses one byte, on one rank, of what it copies or of what it pushes."""

    def copy(self, after: Sequence[None], copies: Sequence[Any]) -> None:
        super().copy(after, copies)
        if self.rank == 1 and self.copied == 3:
            copies[0][0].view(torch.uint8)[0, 0, 0, 0] += 1


class FaultyLater(SharedLink):
    """Loses one byte of results that are borrowed, on the rank that it pushes to."""

    def push(self, after: Sequence[None], copies: Sequence[Any]) -> None:
        super().push(after, copies)
        if self.rank == 1 and len(self.allocated) == 2 and copies[0][0].shape[1] > 30:
            copies[0][0].view(torch.uint8)[0, 0, 0, 0] += 1


class Failing(SharedLink):
    """Cannot copy, on no rank."""

    def copy(self, after: Sequence[None], copies: Sequence[Any]) -> None:
        raise OSError("no copies today\nand more")


def prove(ulysses: int, folder: str, kind: type[SharedLink]) -> tuple[bool, str | None, int]:
    axis = mesh_of(ulysses).ulysses
    link = kind(axis, folder)
    copier, why = proven(CopyEngine(link, 16384, 2**20), axis, CPU)
    assert len(link.allocated) > 1 or why is not None, "some results are borrowed"
    return copier is not None, why, link.met


@pytest.mark.parametrize("ulysses", [2, 3, 4])
def test_the_proof_passes_what_works(run_ranks: RunRanks, tmp_path: Path, ulysses: int) -> None:
    for works, why, met in run_ranks(ulysses, prove, ulysses, str(tmp_path), SharedLink):
        assert works
        assert why is None
        assert met > 3 * 4 * 2, "every slot more than once"


@pytest.mark.parametrize(("kind", "rank"), [(Faulty, 1), (FaultyLater, 2)])
def test_one_rank_with_a_wrong_byte_stops_all(
    run_ranks: RunRanks, tmp_path: Path, kind: type[SharedLink], rank: int
) -> None:
    for works, why, _ in run_ranks(3, prove, 3, str(tmp_path), kind):
        assert not works
        assert why is not None and f"differs from the collective's (rank {rank})" in why


def test_what_fails_is_told_in_one_line(run_ranks: RunRanks, tmp_path: Path) -> None:
    for works, why, _ in run_ranks(2, prove, 2, str(tmp_path), Failing):
        assert (works, why) == (False, "OSError: no copies today (rank 0)")


class Place:
    """Stands in for what a rank knows of its GPU."""

    def __init__(self, device: torch.device) -> None:
        pass

    def told(self) -> int:
        return dist.get_rank()

    def problem(self, places: Sequence[int]) -> str | None:
        return None if list(places) == [0, 1, 2] else f"unexpected {places}"


class Symmetric(SharedLink, SymmetricLink):
    """A link over shared files whose ranks agree on each step as those of a GPU do."""

    def allocate(self, count: int, slot_bytes: int) -> Slots:
        return SymmetricLink.allocate(self, count, slot_bytes)

    def _connect(self, memory: torch.Tensor, count: int, slot_bytes: int) -> Slots:
        slots = SharedLink.allocate(self, count, slot_bytes)
        fail("map", self.folder)
        return slots


def fail(name: str, fails: str) -> None:
    if fails.endswith(name) and dist.get_rank() == 2:
        raise RuntimeError(f"cannot {name}")


def build(fails: str, folder: str) -> tuple[bool, str | None]:
    """Build a copy engine with one step failing on rank 2 alone."""
    axis = mesh_of(3).ulysses
    folder = f"{folder}/{fails}"
    Path(folder).mkdir(exist_ok=True)

    def allocate(size: int, device: torch.device) -> torch.Tensor:
        fail("allocate", folder)
        return torch.empty(size)

    def connect(axis: Axis, device: torch.device) -> Symmetric:
        fail("connect", folder)
        link = Symmetric(axis, folder)
        link.device = device
        return link

    with (
        patch.object(symmetric, "_Place", Place),
        patch.object(symmetric, "allocate_symmetric", allocate),
        patch.object(symmetric, "SymmetricLink", connect),
    ):
        copier, why = symmetric._build(axis, CPU, 16384, 2**20)
    return copier is not None, why


def test_a_step_that_fails_on_one_rank_is_given_up_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(3, build, "nothing", str(tmp_path)) == [(True, None)] * 3
    for name in ("allocate", "connect", "map"):
        told = (False, f"RuntimeError: cannot {name} (rank 2)")
        assert run_ranks(3, build, name, str(tmp_path)) == [told] * 3


def unequal(ulysses: int, folder: str) -> list[str]:
    """Compare both ways of exchanging: uneven and replicated heads, rows, interleaved parts, views."""
    axis = mesh_of(ulysses).ulysses
    copier = CopyEngine(SharedLink(axis, folder), 8192, 2**20)
    found = []
    for heads, kv_heads, rows, tokens, tile, dtype in (
        (4, 2, 1, 1, None, torch.float32),
        (9, 3, 2, 17, 5, torch.bfloat16),
        (5, 1, 3, 8, 4, torch.float64),
        (4, 4, 1, 70, 16, torch.bfloat16),
    ):
        split, layout = HeadSplit(heads, kv_heads, ulysses), Layout(tokens * ulysses, 1, ulysses, tile)
        shapes = [(rows, n, tokens, d) for n, d in ((heads, 6), (kv_heads, 6), (kv_heads, 10))]
        sent = [torch.randn(shape).to(dtype).transpose(1, 2) for shape in shapes]
        wanted = [split.query, split.key, split.key]
        by_copies = replace(axis, copier=copier)
        ways = [(axis, False), (by_copies, False), (by_copies, True)]
        there = [to_heads(sent, wanted, way, layout.tiles(), borrow).wait() for way, borrow in ways]
        back = [to_tokens(there[0], wanted, way, layout.tiles(), borrow).wait() for way, borrow in ways]
        for name, (true, *others) in (("heads", there), ("tokens", back)):
            for i, a in enumerate(true):
                if any(a.shape != other[i].shape or not torch.equal(a, other[i]) for other in others):
                    found.append(f"{name} of {heads}:{kv_heads} in {dtype}")
        if not torch.equal(back[0][0], sent[0]):
            found.append(f"queries do not come back: {heads}:{kv_heads}")
    return found


@pytest.mark.parametrize("ulysses", [2, 3, 4])
def test_copies_give_what_collectives_give(run_ranks: RunRanks, tmp_path: Path, ulysses: int) -> None:
    assert run_ranks(ulysses, unequal, ulysses, str(tmp_path)) == [[]] * ulysses


def attend_cases(ulysses: int, ring: int, folder: str, wanted: list[Case]) -> list[dict[str, float]]:
    mesh = equipped(mesh_of(ulysses, ring), folder)
    found = [errors(case, mesh) for case in wanted]
    assert mesh.ulysses.copier is not None and mesh.ulysses.copier.link.met > len(wanted)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_attention_over_copies_is_exact(run_ranks: RunRanks, tmp_path: Path, ulysses: int, ring: int) -> None:
    wanted = [*cases(4, 2, "reference"), *cases(5, 1, "reference")[-4:]]
    assert not wrong(run_ranks(ulysses * ring, attend_cases, ulysses, ring, str(tmp_path), wanted), wanted)


def streamed(degrees: tuple[int, int], rows: Rows, memory: Memory, folder: str) -> Errors:
    links = []

    def equip(mesh: Mesh, device: torch.device) -> tuple[Mesh, str]:
        links.append(equipped(mesh, folder))
        return links[0], "heads exchanged by shared files"

    with patch("longspan.integrations.transformers.prepare.with_copy_engine", equip):
        found = streamed_errors("llama", degrees, rows, memory)
    assert links[0].ulysses.copier.link.met > 5
    return found


MEMORIES = {
    "x+O+KV, ahead": Memory(5, Keep.X_O_KV, "eager"),
    "products": Memory(5, Keep.PRODUCTS, "eager"),
    "x": Memory(3, Keep.X),
    "graph, x+O": Memory(5, (Keep.GRAPH, Keep.X_O)),
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("degrees", [(2, 1), (2, 2)], ids=str)
def test_layers_in_tiles_over_copies_are_exact(
    run_ranks: RunRanks, tmp_path: Path, degrees: tuple[int, int], memory: str
) -> None:
    rows = Rows([[20, 1, 6, 14]])
    results = run_ranks(degrees[0] * degrees[1], streamed, degrees, rows, MEMORIES[memory], str(tmp_path))
    assert exact(results), worst(results)


def test_nothing_is_decided_without_gpus_or_without_ranks() -> None:
    for mesh, device in ((Mesh(), "cuda"), (Mesh(ulysses=Axis(2, 0, (0, 1))), "cpu")):
        assert with_copy_engine(mesh, torch.device(device)) == (mesh, None)

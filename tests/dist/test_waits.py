"""How long compute waits for what other ranks send, in every way that something is sent."""

from __future__ import annotations

import time

import pytest
import torch

from longspan.comm.exchange import to_heads, to_tokens
from longspan.comm.ring import Packet, shift
from longspan.comm.rows import exchange_rows
from longspan.mesh import build_mesh
from longspan.plan.degrees import Degrees
from pool import RunRanks

pytestmark = pytest.mark.dist

LATE_S = 0.1


def waited(rank_0_is_late: bool) -> list[dict[str, float]]:
    """Exchange in several ways, one rank coming late to each; return the waits of each way, and those with no watch."""
    ring = build_mesh(torch.arange(2).view(1, 2), Degrees(1, 2, ""), "cpu")
    heads = build_mesh(torch.arange(2).view(1, 2), Degrees(2, 1, ""), "cpu")
    late = (heads.sequence.rank == 0) == rank_0_is_late
    x, owned = torch.ones(1, 4, 2, 3), [[range(1), range(1, 2)]]
    ways = {
        "heads": (heads, lambda: to_heads([x], owned, heads.ulysses)),
        "tokens": (heads, lambda: to_tokens([torch.ones(1, 8, 1, 3)], owned, heads.ulysses)),
        "ring": (ring, lambda: shift(Packet.of([x]), ring.ring)),
        "rows": (ring, lambda: exchange_rows(torch.ones(4, 3), [2, 2], [2, 2], ring.ring)),
    }
    found = []
    for running in (True, False):
        for mesh, way in ways.values():
            assert mesh.ring.waits is mesh.ulysses.waits is mesh.sequence.waits
            mesh.sequence.waits.running = running
            torch.distributed.barrier()
            if late:
                time.sleep(LATE_S)
            way().wait()
            found.append(mesh.sequence.waits.take())
    return found


def test_waits_for_a_late_rank_are_counted_on_the_other(run_ranks: RunRanks) -> None:
    for rank_0_is_late in (True, False):
        ranks = run_ranks(2, waited, rank_0_is_late)
        early = ranks[1 if rank_0_is_late else 0]
        for mine in ranks:
            assert [set(way) for way in mine] == [{"exchange"}] * 4 + [set()] * 4
        assert all(0.5 * LATE_S < way["exchange"] < 20 * LATE_S for way in early[:4]), early

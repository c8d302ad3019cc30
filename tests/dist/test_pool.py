"""The pool of processes itself: what a case returns, raises or never returns."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pool import RankError, RunRanks

pytestmark = pytest.mark.dist


def rank_and_world(offset: int, *, scale: int = 1) -> tuple[int, int, int]:
    ranks = torch.tensor(dist.get_rank())
    dist.all_reduce(ranks)
    return dist.get_rank() * scale + offset, dist.get_world_size(), int(ranks)


def test_every_rank_returns_and_the_world_is_as_asked(run_ranks: RunRanks) -> None:
    for world in (1, 3, 4, 2):
        wanted = [(10 * rank + 5, world, world * (world - 1) // 2) for rank in range(world)]
        assert run_ranks(world, rank_and_world, 5, scale=10) == wanted


def fail(who: int) -> None:
    if dist.get_rank() == who:
        raise ValueError("a mistake of one rank")


def fail_before_a_collective(who: int) -> None:
    fail(who)
    dist.barrier()


@pytest.mark.parametrize("case", [fail, fail_before_a_collective])
def test_an_exception_brings_its_traceback(run_ranks: RunRanks, case: Any) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(3, case, 1)
    assert "--- rank 1" in str(error.value)
    assert 'raise ValueError("a mistake of one rank")' in str(error.value)
    assert run_ranks(3, rank_and_world, 0)[2][2] == 3


def hang() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(60)


def end() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_a_hang_shows_every_stack_and_ends(run_ranks: RunRanks) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        run_ranks(2, hang, timeout_s=1)
    assert time.monotonic() - start < 10
    told = str(error.value)
    assert "--- rank 0" in told
    assert "--- rank 1" in told
    assert "in barrier" in told
    assert told.count("in hang") == 2
    assert run_ranks(2, rank_and_world, 0)[1][1] == 2


def test_a_process_that_ends_is_reported_and_replaced(run_ranks: RunRanks) -> None:
    with pytest.raises(RankError, match=r"--- rank 1\nthe process ended"):
        run_ranks(2, end)
    assert run_ranks(2, rank_and_world, 0)[1][1] == 2


def unwritten_memory() -> bool:
    x = torch.zeros(3)
    made = [torch.empty(5), torch.empty_like(x), x.new_empty(4), torch.empty(2, 2, dtype=torch.float64)]
    return all(bool(t.isnan().all()) for t in made)


def test_unwritten_memory_is_poisoned(run_ranks: RunRanks) -> None:
    assert run_ranks(2, unwritten_memory) == [True, True]


def groups() -> int:
    dist.new_group([0, 1])
    return len(dist.distributed_c10d._world.pg_map)


def test_groups_of_a_case_end_with_it(run_ranks: RunRanks) -> None:
    assert run_ranks(2, groups) == run_ranks(2, groups)

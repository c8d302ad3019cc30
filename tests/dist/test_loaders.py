"""Loaders of several ranks: equal steps everywhere, one number of targets, and no rank that waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan.batch import CONTEXT, shard_batch
from longspan.errors import BatchError
from longspan.loader import ShardedLoader
from longspan.mesh import Mesh, build_mesh, data_parallel_ranks
from longspan.plan.degrees import Degrees
from pool import RunRanks

pytestmark = pytest.mark.dist


def mesh() -> Mesh:
    """Two data ranks of two sequence ranks each."""
    return build_mesh(data_parallel_ranks(2, None), Degrees(1, 2, ""), "cpu")


def loader(batches: list[dict[str, Any]], accumulation: int = 1) -> ShardedLoader:
    axes = mesh()
    return ShardedLoader(batches, lambda batch: shard_batch(batch, axes), axes, accumulation)


def batches(count: int, first: int) -> list[dict[str, Any]]:
    return [
        {"input_ids": torch.arange(first, first + n)[None], "labels": torch.arange(n)[None]}
        for n in range(4, 4 + count)
    ]


def uneven(counts: tuple[int, int], accumulation: int) -> tuple[int, list[int]]:
    data = dist.get_rank() // 2
    found = loader(batches(counts[data], 10 * data), accumulation)
    items = [int(part[CONTEXT].num_items) for part in found]
    return found.dropped, items


def test_all_ranks_stop_with_the_data_rank_that_has_least(run_ranks: RunRanks) -> None:
    for counts, accumulation, wanted in [((3, 5), 1, 3), ((5, 3), 2, 2), ((4, 0), 1, 0), ((4, 4), 2, 4)]:
        results = run_ranks(4, uneven, counts, accumulation)
        assert [len(items) for _, items in results] == [wanted] * 4
        assert len({tuple(items) for _, items in results}) == 1
        assert all(dropped <= accumulation for dropped, _ in results)


def test_the_targets_of_a_step_are_those_of_all_data_ranks_and_micro_batches(run_ranks: RunRanks) -> None:
    """Micro-batch i has i + 3 targets on either data rank."""
    assert run_ranks(4, uneven, (4, 4), 2)[0][1] == [2 * (3 + 4)] * 2 + [2 * (5 + 6)] * 2


def different(field: str, who: int) -> str:
    """Let one rank read something else than the other of its sequence; return what each rank is told."""
    batch: dict[str, Any] = {
        "input_ids": torch.arange(8)[None],
        "labels": torch.arange(8)[None],
        "scale": torch.tensor(1.0),
    }
    if dist.get_rank() == who:
        batch[field] = batch[field] + 1
    with pytest.raises(BatchError) as error:
        list(loader([batch]))
    return str(error.value)


@pytest.mark.parametrize("field", ["input_ids", "labels", "scale"])
def test_sequence_ranks_that_read_different_batches_are_told_so(run_ranks: RunRanks, field: str) -> None:
    """The ranks of the other data rank stop too, and do not wait until they time out."""
    told = run_ranks(4, different, field, 3, timeout_s=20)
    assert all("read different batches (batch 0)" in each for each in told[2:])
    assert all(each.startswith("Data rank 1 (process ") and "read different batches" in each for each in told[:2])


def broken(data: int) -> str:
    good = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    bad = good | {"attention_mask": torch.tensor([[0] + [1] * 7])}
    with pytest.raises(BatchError) as error:
        list(loader([good, bad if dist.get_rank() // 2 == data else good]))
    return str(error.value)


def test_a_batch_that_one_data_rank_cannot_shard_stops_all(run_ranks: RunRanks) -> None:
    told = run_ranks(4, broken, 0, timeout_s=20)
    assert all("Pad on the right" in each for each in told[:2])
    for process, each in enumerate(told[2:]):
        assert each == f"Data rank 0 (process {process}) cannot use its batch: {told[0]}"


def foreign(alone: bool) -> str:
    """Let one data rank, or one process of it alone, fail with what is no error of longspan's own."""
    axes, batch = mesh(), {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}

    def shard(batch: dict[str, Any]) -> dict[str, Any]:
        if axes.data.rank == 1 and not (alone and axes.sequence.rank):
            raise KeyError("pixels")
        return shard_batch(batch, axes)

    with pytest.raises((BatchError, KeyError)) as error:
        list(ShardedLoader([batch], shard, axes))
    return f"{error.type.__name__}: {error.value}"


def test_any_error_of_one_data_rank_stops_all(run_ranks: RunRanks) -> None:
    told = run_ranks(4, foreign, False, timeout_s=20)
    assert told[2:] == ["KeyError: 'pixels'"] * 2
    assert all("cannot use its batch: KeyError: 'pixels'" in each for each in told[:2])
    first, second, failed, partner = run_ranks(4, foreign, True, timeout_s=20)
    assert failed == "KeyError: 'pixels'" and "KeyError: 'pixels'" in first
    assert partner.startswith("BatchError: Another rank of this sequence cannot use its batch") and "Another" in second

"""The loader of one process; tests/dist/test_loaders.py has several."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longspan.batch import CONTEXT, shard_batch
from longspan.errors import BatchError
from longspan.loader import ShardedLoader
from longspan.mesh import Mesh


def shard(batch: Any) -> dict[str, Any]:
    return shard_batch(batch, Mesh())


def batches(count: int, tokens: int = 4) -> list[dict[str, torch.Tensor]]:
    """Return batches of growing length; batch i has tokens + i - 1 targets and starts with token i."""
    made = []
    for i in range(count):
        ids = torch.arange(tokens + i)[None] + i
        made.append({"input_ids": ids, "labels": ids})
    return made


def firsts(loader: ShardedLoader) -> list[int]:
    return [int(part["input_ids"][0, 0]) for part in loader]


def test_parts_of_a_group_carry_the_targets_of_the_whole_step() -> None:
    loader = ShardedLoader(batches(4), shard, Mesh(), accumulation=2)
    assert [part[CONTEXT].num_items for part in loader] == [3 + 4, 3 + 4, 5 + 6, 5 + 6]
    assert len(loader) == 4


def test_a_part_is_gone_before_the_next_is_given() -> None:
    """With what was worked out for it on the device: memory does not grow with accumulation."""
    cut: list[weakref.ref[Any]] = []

    def noted(batch: Any) -> dict[str, Any]:
        part = shard(batch)
        cut.append(weakref.ref(part[CONTEXT]))
        return part

    alive = [[ref() is not None for ref in cut] for part in ShardedLoader(batches(3), noted, Mesh(), accumulation=3)]
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]


def test_every_epoch_starts_anew_and_what_fills_no_group_is_counted() -> None:
    loader = ShardedLoader(batches(5), shard, Mesh(), accumulation=2)
    assert firsts(loader) == [0, 1, 2, 3]
    assert (loader.dropped, len(loader)) == (1, 4)
    assert firsts(loader) == [0, 1, 2, 3]


def test_an_empty_loader_yields_nothing() -> None:
    assert firsts(ShardedLoader([], shard, Mesh(), accumulation=3)) == []


def test_an_early_break_leaves_nothing_behind() -> None:
    loader = ShardedLoader(batches(4), shard, Mesh())
    for _ in loader:
        break
    assert firsts(loader) == [0, 1, 2, 3]


def test_resume_continues_behind_what_was_consumed() -> None:
    loader = ShardedLoader(batches(6), shard, Mesh(), accumulation=2)
    seen = iter(loader)
    taken = [next(seen) for _ in range(2)]
    state = loader.state_dict()
    again = ShardedLoader(batches(6), shard, Mesh(), accumulation=2)
    again.load_state_dict(state)
    assert [int(part["input_ids"][0, 0]) for part in taken] == [0, 1]
    assert firsts(again) == [2, 3, 4, 5]
    assert firsts(again) == [0, 1, 2, 3, 4, 5]


def test_a_state_saved_after_an_epoch_is_the_start_of_the_next() -> None:
    loader = ShardedLoader(batches(5), shard, Mesh(), accumulation=2)
    assert firsts(loader) == [0, 1, 2, 3]
    again = ShardedLoader(batches(5), shard, Mesh(), accumulation=2)
    again.load_state_dict(loader.state_dict())
    assert firsts(again) == [0, 1, 2, 3]


def test_a_state_that_was_just_loaded_is_that_state() -> None:
    loader = ShardedLoader(batches(6), shard, Mesh(), accumulation=2)
    firsts(loader)
    loader.load_state_dict({"consumed": 4})
    again = ShardedLoader(batches(6), shard, Mesh(), accumulation=2)
    again.load_state_dict(loader.state_dict())
    assert firsts(again) == firsts(loader) == [4, 5]


class Stateful:
    """A loader that knows where it stands, like torchdata's."""

    def __init__(self, count: int) -> None:
        self.rows, self.at = batches(count), 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_the_inner_loader_keeps_its_own_state() -> None:
    loader = ShardedLoader(Stateful(6), shard, Mesh(), accumulation=2)
    seen = iter(loader)
    for _ in range(4):
        next(seen)
    again = ShardedLoader(Stateful(6), shard, Mesh(), accumulation=2)
    again.load_state_dict(loader.state_dict())
    assert firsts(again) == [4, 5]
    assert firsts(again) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("inner", [batches(4), Stateful(4)])
def test_a_state_in_the_middle_of_a_step_is_refused(inner: Any) -> None:
    """The rest of the step would be lost, or counted in another one."""
    loader = ShardedLoader(inner, shard, Mesh(), accumulation=2)
    seen = iter(loader)
    next(seen)
    with pytest.raises(BatchError, match="1 of 2 micro-batches"):
        loader.state_dict()


def test_a_batch_that_cannot_be_sharded_is_named() -> None:
    loader = ShardedLoader([{"labels": torch.ones(1, 3)}], shard, Mesh())
    with pytest.raises(BatchError, match="needs input_ids"):
        list(loader)


def test_accumulation_must_be_positive() -> None:
    with pytest.raises(BatchError, match="at least 1, got 0"):
        ShardedLoader([], shard, Mesh(), accumulation=0)

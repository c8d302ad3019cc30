"""Every rank's batches become micro-steps of all ranks that share rows, over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from longspan.errors import BatchError, ConfigError
from longspan.integrations.deepspeed import UlyssesSPDataLoaderAdapter

pytestmark = pytest.mark.dist


def batch(rank: int, index: int, length: int) -> dict[str, Any]:
    first = 100 * rank + 10 * index
    ids = first + torch.arange(2 * length).view(2, length)
    return {
        "input_ids": ids,
        "labels": ids + 1000,
        "position_ids": torch.arange(length, dtype=torch.int32).expand(2, -1),
        "weights": ids.double() / 8,
        "flags": ids % 3 == 0,
        "vectors": torch.stack([ids, -ids], -1).to(torch.bfloat16),
        "name": f"rank {rank}, batch {index}",
        "lengths": [rank, index],
    }


def batches(rank: int, count: int = 3) -> list[dict[str, Any]]:
    return [batch(rank, index, (7, 4, 9)[index] + 2 * rank) for index in range(count)]


def adapter(source: Any, **changed: Any) -> UlyssesSPDataLoaderAdapter:
    size = dist.get_world_size()
    given = {"sp_rank": dist.get_rank(), "sp_group": dist.group.WORLD, "sp_world_size": size, "device": "cpu"}
    return UlyssesSPDataLoaderAdapter(source, **given | changed)


def epoch() -> list[dict[str, Any]]:
    loader = adapter(batches(dist.get_rank()))
    assert len(loader) == 3 * dist.get_world_size()
    steps = list(loader)
    assert len(steps) == len(loader)
    again = list(loader)
    for one, other in zip(steps, again, strict=True):
        assert all(torch.equal(one[k], other[k]) if isinstance(one[k], Tensor) else one[k] == other[k] for k in one)
    return steps


@pytest.mark.parametrize("world", [2, 3])
def test_each_batch_is_worked_on_by_all(run_ranks: Any, world: int) -> None:
    found = run_ranks(world, epoch)
    for step in range(3 * world):
        owner, index = step % world, step // world
        given = batches(owner)[index]
        length = given["input_ids"].shape[1]
        parts = [steps[step] for steps in found]
        for part in parts:
            assert part["name"] == given["name"] and part["lengths"] == given["lengths"]
            assert "labels" not in part
            assert part["input_ids"].shape == (2, -(-length // world))
        for name in ("input_ids", "position_ids", "weights", "flags", "vectors"):
            whole = torch.cat([part[name] for part in parts], 1)
            assert whole.dtype == given[name].dtype and whole.device.type == "cpu"
            assert torch.equal(whole[:, :length], given[name])
        targets = torch.cat([part["shift_labels"] for part in parts], 1)
        assert torch.equal(targets[:, : length - 1], given["labels"][:, 1:])
        assert (targets[:, length - 1 :] == -100).all(), "the last token and padding have no target"
        positions = torch.cat([part["position_ids"] for part in parts], 1)
        assert torch.equal(positions, torch.arange(positions.shape[1]).expand(2, -1).int()), "padding counts on"


def unlike_counts() -> tuple[int, int]:
    loader = adapter(batches(dist.get_rank(), 3 - dist.get_rank()))
    counts = [len(list(loader)) for _ in range(2)]
    assert counts[0] == counts[1]
    return counts[0], loader.dropped


def test_ranks_with_unlike_numbers_of_batches_stop_together(run_ranks: Any) -> None:
    assert run_ranks(2, unlike_counts) == [(4, 1), (4, 0)]


class Remembering:
    """A loader that keeps a state of its own."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.at = items, 0

    def __iter__(self) -> Any:
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def resumed(kind: type) -> None:
    rank = dist.get_rank()
    names = [part["name"] for part in adapter(kind(batches(rank)))]
    for taken in range(7):
        loader = adapter(kind(batches(rank)))
        iterator = iter(loader)
        begun = [next(iterator)["name"] for _ in range(taken)]
        other = adapter(kind(batches(rank)))
        other.load_state_dict(loader.state_dict())
        assert other.state_dict() == loader.state_dict(), "before the first step too"
        iter(other)
        third = adapter(kind(batches(rank)))
        third.load_state_dict(other.state_dict())
        assert begun + [part["name"] for part in third] == names
        assert begun + [part["name"] for part in other] == names
    loader = adapter(kind(batches(rank)))
    assert [part["name"] for part in loader] == names
    other = adapter(kind(batches(rank)))
    other.load_state_dict(loader.state_dict())
    assert [part["name"] for part in other] == names, "the next epoch, as a whole"
    for part in loader:
        assert part["name"] == names[0]
        break
    if kind is list:
        list(iter(loader))
        iter(loader)
        assert loader.state_dict() == {"batches": 0, "used": 0}, "a new epoch has begun"


@pytest.mark.parametrize("kind", [list, Remembering])
def test_iteration_goes_on_where_it_was_saved(run_ranks: Any, kind: type) -> None:
    run_ranks(2, resumed, kind)


def bad() -> list[str]:
    told = []
    good, rank = batch(0, 0, 6), dist.get_rank()
    changes = [
        {"position_ids": None},
        {"labels": None},
        {"pixels": torch.zeros(2, 5, 3)},
        {"scalar": torch.tensor(1.0)},
        {"input_ids": torch.zeros(2, 0, dtype=torch.long)},
    ]
    for change in changes:
        wrong = {name: value for name, value in (good | change).items() if value is not None}
        with pytest.raises(BatchError) as error:
            next(adapter([wrong if rank == 1 else good]))
        told.append(str(error.value))
    with pytest.raises(ConfigError, match=f"sp_rank {1 - rank} of 2 was given with a group in which it is {rank} of 2"):
        adapter([], sp_rank=1 - rank)
    return told


def test_batches_that_cannot_be_divided_stop_all_ranks(run_ranks: Any) -> None:
    other, own = run_ranks(2, bad)
    assert all(
        "Rank 1 of those that share rows" in words and mine in words for words, mine in zip(other, own, strict=True)
    )
    positions, labels, pixels, scalar, empty = own
    assert "torch.arange(input_ids.shape[1])" in positions and "torch.cat([torch.arange(n) for n in" in positions
    assert "needs labels as tensors [B, S]" in labels
    assert "pixels has shape [2, 5, 3]" in pixels and "input_ids [2, 6]" in pixels
    assert "scalar has shape []" in scalar
    assert "input_ids must be [B, S] with at least one token" in empty


def test_one_rank_alone_and_a_loader_of_torch() -> None:
    rows = [{k: v for k, v in batch(0, 0, 5).items() if isinstance(v, Tensor)}]
    whole: Any = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    loader = UlyssesSPDataLoaderAdapter(whole, 0, None, 1, "cpu")
    (part,) = loader
    assert torch.equal(part["input_ids"], rows[0]["input_ids"])
    assert torch.equal(part["shift_labels"][:, :-1], rows[0]["labels"][:, 1:])

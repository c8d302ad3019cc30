"""The mean over all ranks' targets from each rank's own mean loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import spawn

from longspan.errors import BatchError, ConfigError, TopologyError
from longspan.loss import reduce_loss

WORLD, TOKENS, VOCABULARY = 3, 7, 5
TARGETS = (4, 0, 7)  # per rank


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rank)
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    labels[TARGETS[rank] :] = -100
    return torch.randn(TOKENS, VOCABULARY, dtype=torch.float64), labels


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results, groups = {}, {"default": None, "world": dist.new_group(), "pair": dist.new_group([0, 1])}
    for via in ("all_gather", "all_reduce"):
        for name in ("default", "world"):
            logits, labels = batch(rank)
            loss = F.cross_entropy(logits.requires_grad_(), labels)
            result = reduce_loss(loss, labels, cast(dist.ProcessGroup | None, groups[name]), via)
            (result * 0.37).backward()
            results[via, name] = result.detach(), logits.grad
        nowhere = reduce_loss(torch.tensor(math.nan), torch.full((TOKENS,), -100), via=via)
        results[via, "nowhere"] = nowhere, nowhere
    if rank == 2:
        with pytest.raises(TopologyError, match="Rank 2 is not in the group"):
            reduce_loss(loss, labels, cast(dist.ProcessGroup, groups["pair"]))
    torch.save(results, Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.dist
def test_three_ranks_one_without_targets(tmp_path):
    spawn(work, (str(tmp_path),), nprocs=WORLD)
    parts = [batch(rank) for rank in range(WORLD)]
    logits = torch.cat([part[0] for part in parts]).requires_grad_()
    loss = F.cross_entropy(logits, torch.cat([part[1] for part in parts]))
    (d_logits,) = torch.autograd.grad(loss * 0.37, logits)
    values = []
    for rank in range(WORLD):
        results = torch.load(tmp_path / f"{rank}.pt")
        truth = d_logits[rank * TOKENS : (rank + 1) * TOKENS] * WORLD  # an engine that averages divides it again
        for name, (value, gradient) in results.items():
            if name[1] == "nowhere":
                assert value == 0
                continue
            values.append(value)
            torch.testing.assert_close(value, loss.detach(), rtol=1e-14, atol=0)
            torch.testing.assert_close(gradient, truth, rtol=1e-12, atol=0)
            assert (gradient != 0).any() == (TARGETS[rank] > 0)
        assert torch.equal(results["all_gather", "world"][1], results["all_reduce", "world"][1])
    assert all(torch.equal(value, values[0]) for value in values)


def test_one_process():
    labels = torch.tensor([3, -100])
    loss = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    result = reduce_loss(loss, labels)
    (result * 0.37).backward()
    assert result == loss
    assert loss.grad == 0.37
    loss = torch.tensor([math.nan], requires_grad=True)
    result = reduce_loss(loss, labels, ignore_index=-100)
    assert result.isnan(), "a rank with targets has no excuse for NaN"
    result = reduce_loss(loss, labels.fill_(-1), ignore_index=-1)
    result.backward()
    assert result.shape == ()
    assert result == 0
    assert loss.grad == 0
    assert reduce_loss(loss.detach().bfloat16(), labels).dtype == torch.float32


def test_wrong_input():
    with pytest.raises(ConfigError, match="via must be 'all_gather' or 'all_reduce', got 'gather'"):
        reduce_loss(torch.tensor(1.0), torch.tensor([1]), via="gather")  # pyright: ignore[reportArgumentType]
    with pytest.raises(BatchError, match=r"one element; got shape \(2,\)"):
        reduce_loss(torch.ones(2), torch.tensor([1]))

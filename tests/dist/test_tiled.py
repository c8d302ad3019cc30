"""Tiled MLPs under engines that see every gradient: ranks that cut differently, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import longspan
from longspan.errors import ModelError
from models import build
from pool import RunRanks

pytestmark = pytest.mark.dist


def ids(rank: int) -> Tensor:
    return torch.randint(37, (2, 7 + 6 * rank), generator=torch.Generator().manual_seed(rank))


def loss(model: nn.Module, rank: int) -> Tensor:
    logits = model(input_ids=ids(rank), use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids(rank)[:, 1:].flatten())


def in_fp64() -> Any:
    """Build a model without islands of fp32, also in what is computed again in backward."""
    model = build("llama")
    model.set_attn_implementation("sdpa")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(24, eps=1e-6).double()
                norm.load_state_dict(child.state_dict())
                setattr(module, name, norm)
    return model


def wrap(model: Any, engine: str) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        if engine == "fsdp2-nested":
            fully_shard(layer.mlp)
        fully_shard(layer)
    fully_shard(model)
    return model


def train(engine: str, first: bool, checkpointed: bool) -> float:
    """Return the largest relative error of a gradient; ranks cut into 2 tiles, into 7, and into one each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = in_fp64()
    plain = copy.deepcopy(model)
    for r in range(world):
        (loss(plain, r) / world).backward()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if first:
        longspan.tiled_mlp(model, tiles=(2, 7, 100)[rank])
    module = wrap(model, engine)
    if not first:
        longspan.tiled_mlp(model, tiles=(2, 7, 100)[rank])
    for _ in range(2):
        model.zero_grad()
        loss(module, rank).backward()
    errors = []
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        gradient = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        errors.append(float((gradient - wanted.grad).norm() / wanted.grad.norm()))
    return max(errors)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp2-nested"])
def test_ranks_may_cut_differently(run_ranks: RunRanks, engine: str, first: bool, checkpointed: bool) -> None:
    assert max(run_ranks(3, train, engine, first, checkpointed)) < 1e-10


def sharded_inside() -> None:
    """A unit of fully_shard inside what is tiled has no whole parameters when the tiles begin."""
    mlp = build("llama").model.layers[0].mlp
    fully_shard(mlp.down_proj)
    longspan.tiled_mlp(mlp, tiles=2)
    with pytest.raises(ModelError, match=r"DTensor.*fully_shard"):
        mlp(torch.zeros(1, 1, 24, dtype=torch.float64))


def test_parameters_sharded_inside_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(2, sharded_inside)

"""What a forward pass of a prepared model returns as its loss: global values, each rank's share of the gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.batch import IGNORE_INDEX, Shard
from longspan.stream.routing import Choices


def global_loss(local: Tensor, shard: Shard, grad_reduction: str) -> Tensor:
    """Turn the sum over this rank's targets into the mean over all targets.

    The value is the same on every rank. The gradient is this rank's share: an engine that averages over the W ranks
    of `mesh.world` gets W / N of the local sum, one that adds up gets 1 / N, N being `num_items`.

    Cost: one all-reduce of a scalar over the world axis, and one over the data axis when `num_items` is None.
    """
    world, data = shard.mesh.world, shard.mesh.data
    items = torch.as_tensor(shard.targets if shard.num_items is None else shard.num_items).to(local.device, local.dtype)
    if shard.num_items is None and data.size > 1:
        items = items.clone()
        dist.all_reduce(items, group=data.group)
    items = items.clamp(min=1)
    total = local.detach().clone()
    if world.size > 1:
        dist.all_reduce(total, group=world.group)
    share = (world.size if grad_reduction == "mean" else 1) / items
    return _Reported.apply(local, total / items, share)  # type: ignore[no-any-return]


def balance_loss(
    choices: Choices, top_k: int, shard: Shard, shift_labels: Tensor | None, grad_reduction: str
) -> tuple[Tensor, Tensor | float]:
    """Turn what this rank's tokens chose into the auxiliary loss of all tokens of the micro-batch, on all ranks.

    With C the counts and P the sums of probabilities per expert, over all tokens and layers, and R the number of
    (token, layer) pairs, it is E * sum(C / R * P / R), as transformers defines it. Value and gradient are divided over
    the ranks as in `global_loss`.

    Returns:
        The auxiliary loss, and its weight in the loss: 1, or where `num_items` is given the share that this
        micro-batch has in these targets, so that the weights of an optimizer step add up to 1.

    Cost: one all-reduce of 2 E + 1 numbers over the world axis.
    """
    world, counts = shard.mesh.world, choices.counts
    targets = torch.zeros((), dtype=torch.int64) if shift_labels is None else (shift_labels != IGNORE_INDEX).sum()
    parts = (counts, choices.probabilities.detach(), targets.to(counts.device, non_blocking=True)[None])
    sums = torch.cat([part.to(torch.float64) for part in parts])  # exact for counts beyond 2**24
    if world.size > 1:
        dist.all_reduce(sums, group=world.group)
    experts = len(counts)
    pairs = (sums[:experts].sum() / top_k).clamp(min=1)
    factors = experts * sums[:experts] / pairs.square()  # the derivative by each sum of probabilities
    dtype = choices.probabilities.dtype
    value = (factors * sums[experts:-1]).sum().to(dtype)
    local = (factors.to(dtype) * choices.probabilities).sum()
    share = torch.full_like(value, world.size if grad_reduction == "mean" else 1)
    weight: Tensor | float = 1.0
    if shard.num_items is not None:
        items = torch.as_tensor(shard.num_items).to(sums.device, non_blocking=True)
        weight = (sums[-1] / items.clamp(min=1)).to(dtype)
    return _Reported.apply(local, value, share), weight  # type: ignore[return-value]


class _Reported(torch.autograd.Function):
    """Has the value of the global loss and the gradient of the local share."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return dvalue * ctx.saved_tensors[0], None, None

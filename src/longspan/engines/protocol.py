"""What a training loop asks of an engine, and what an engine asks of a prepared model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.engines.origin import Origin
from longspan.errors import TopologyError
from longspan.kernels.protocol import wide
from longspan.mesh import Mesh
from longspan.plan.setup import Optimizer

GradReduction = Literal["mean", "sum"]


class Prepared(Protocol):
    """The part of `longspan.prepare`'s handle that engines use."""

    @property
    def mesh(self) -> Mesh:
        """Axes; `mesh.world` is where gradients are reduced."""
        ...

    @property
    def layers(self) -> Iterable[nn.Module]:
        """The decoder layers of the trunk."""
        ...

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """What runs one after the other and may be gathered one at a time: the layers, and those of a vision tower."""
        ...

    def reduce_gradients(self) -> None:
        """Reduce the gradients of every parameter over `mesh.world`."""
        ...

    def held_by(self, engine: str, optimizer: Optimizer) -> None:
        """Take note of who will hold parameters, and so many bytes of each."""
        ...


class Engine(Protocol):
    """Hold parameters and reduce gradients, in one fixed order of calls.

    `grad_reduction` is what `longspan.prepare` must be told; then wrap once, and per optimizer step: `accumulating`
    around the forward and `backward` of each micro-batch, `reduce`, `clip_grad_norm`. Losses are already divided by the
    targets of the whole step, so nothing is divided by the number of micro-batches.
    """

    name: str
    grad_reduction: GradReduction

    def wrap(self, model: nn.Module, prepared: Prepared, origin: Origin | None = None) -> nn.Module:
        """Return the module to call; afterwards its parameters are the ones to optimise.

        Args:
            origin: where the weights of a model on the meta device come from.
        """
        ...

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Surround one micro-batch; gradients are reduced in the last one's backward at the earliest."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Differentiate a micro-batch's loss."""
        ...

    def reduce(self) -> None:
        """Finish what the backward passes left to reduce."""
        ...

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scale the gradients down to a global norm, if above it, and return the norm before."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a parameter or buffer whole, detached; all processes call it for the same ones in the same order."""
        ...

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the reduced gradient of a parameter, whole and detached, called as `whole` is; None if it has none."""
        ...


@runtime_checkable
class StepsItself(Protocol):
    """What an engine adds that clips and steps itself: it takes the optimizer between `wrap` and the first forward."""

    def adopt(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> None:
        """Take an optimizer of the parameters that `wrap` returned; it is stepped by `step` alone from now on."""
        ...

    def step(self) -> Tensor:
        """Clip, step and drop the gradients, after the last backward; return their global norm before clipping."""
        ...

    @property
    def applied(self) -> bool:
        """Whether the parameters have moved in the last `step`."""
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


class OwnBackward:
    """What engines have in common that leave differentiating to autograd and parameters to torch."""

    def backward(self, loss: Tensor) -> None:
        """Differentiate."""
        loss.backward()

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor. Cost: an all-gather, if it is sharded."""
        return whole(tensor)

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Gather a gradient. Cost: an all-gather, if it is sharded."""
        return None if parameter.grad is None else whole(parameter.grad)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def require_processes(engine: str) -> None:
    """Raise unless the processes have met.

    Raises:
        TopologyError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise TopologyError(
            f"Engine {engine} needs torch.distributed, which is not initialised: start with `longspan train` or "
            "torchrun, or choose engine single."
        )


def clip_by_global_norm(
    parameters: Iterable[nn.Parameter], max_norm: float | None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Clip gradients by their norm over all parameters, as one process with whole parameters would.

    Args:
        max_norm: None leaves the gradients as they are.
        group: processes that shard the parameters that are DTensors; others count once.

    Returns:
        The norm before clipping, float32 (float64 for float64 gradients), equal on every rank.

    Cost: one all-reduce of one number if parameters are sharded; no host sync.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    whole = [g for g in gradients if not isinstance(g, DTensor)]
    shards = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    squares = _sum_of_squares(whole, gradients[0])
    if shards:
        sharded = _sum_of_squares(shards, gradients[0])
        dist.all_reduce(sharded, group=group)
        squares = squares + sharded
    norm = squares.sqrt()
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([*whole, *shards], scale)  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _sum_of_squares(tensors: list[Tensor], like: Tensor) -> Tensor:
    dtype = wide(like.dtype)
    if not tensors:
        return torch.zeros((), dtype=dtype, device=like.device)
    norms = torch._foreach_norm(tensors, dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square().sum()

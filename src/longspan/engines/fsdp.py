"""FSDP2: parameters, gradients and optimizer state divided over dp x sp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from longspan.engines.origin import Origin
from longspan.engines.protocol import GradReduction, OwnBackward, Prepared, clip_by_global_norm, require_processes


class FullyShardedDataParallel(OwnBackward):
    """Shard each decoder layer, each block of a vision tower, and the rest of the model as one more unit.

    Embedding and head stay in one unit, so tied weights stay one parameter.

    Args:
        compute_dtype: run the model in this type, reduce gradients in float32; None keeps the parameters' own type.
    """

    name = "fsdp2"
    grad_reduction: GradReduction = "mean"

    def __init__(self, compute_dtype: torch.dtype | None = None) -> None:
        self._policy = MixedPrecisionPolicy()
        if compute_dtype is not None:
            self._policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)

    def wrap(self, model: nn.Module, prepared: Prepared, origin: Origin | None = None) -> nn.Module:
        """Shard over the processes of `mesh.world`; the optimizer must be made from the sharded parameters.

        What `origin` brings is sharded unit by unit: a process never holds more than its shards and one unit whole.

        Raises:
            TopologyError: torch.distributed is not initialised.
        """
        require_processes(self.name)
        mesh = prepared.mesh
        self._group = mesh.world.group
        devices = (
            init_device_mesh(mesh.device_type, (1,))
            if self._group is None
            else DeviceMesh.from_group(self._group, mesh.device_type)
        )
        options: dict[str, Any] = {"mesh": devices, "mp_policy": self._policy}
        for unit in (*prepared.blocks, model):
            if origin is not None:
                origin.bring(unit)
            fully_shard(unit, **options)
        self._module = cast(FSDPModule, model)
        return model

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Reduce-scatter in the last micro-batch's backward only; until then gradients are whole and local."""
        self._module.set_requires_gradient_sync(last)
        self._module.set_is_last_backward(last)
        yield

    def reduce(self) -> None:
        """Do nothing: backward has reduced."""

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip by the global norm of the sharded gradients."""
        return clip_by_global_norm(cast(nn.Module, self._module).parameters(), max_norm, self._group)

"""Look at what `deepspeed.initialize` was given, while it initialises a prepared model."""

from __future__ import annotations

import sys
from typing import Any

from longspan.errors import TopologyError
from longspan.mesh import Mesh

_WAY_OUT = "Pass mpu=longspan.engines.MPU(handle.mesh) to deepspeed.initialize"


class DeepSpeedCheck:
    """Called by DeepSpeed for each module that has it under the name `set_deepspeed_parallelism`.

    Raises:
        TopologyError: gradients would be divided by something else than the loss was made for.
    """

    def __init__(self, mesh: Mesh, grad_reduction: str) -> None:
        self.mesh, self.grad_reduction = mesh, grad_reduction

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.grad_reduction != "mean":
            raise TopologyError(
                f"The model was prepared with grad_reduction='{self.grad_reduction}', but DeepSpeed averages: call "
                "longspan.prepare(..., grad_reduction='mean')."
            )
        groups: Any = sys.modules["deepspeed.utils.groups"]
        ranks, world = groups._get_sequence_data_parallel_world_size(), self.mesh.world.size
        if ranks != world:
            raise TopologyError(
                f"DeepSpeed would reduce gradients over {ranks} processes, the prepared model has {world}. {_WAY_OUT}."
            )
        divisor = ranks / float(groups._get_sequence_parallel_world_size())
        if divisor != world:
            raise TopologyError(
                f"DeepSpeed would divide the gradients of {world} processes by {divisor:g} at stages 0 to 2, but by "
                f"{world} at stage 3. {_WAY_OUT} in place of sequence_parallel_size, mesh_param or its own mpu."
            )

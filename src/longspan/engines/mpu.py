"""The axes of a mesh, by the names under which DeepSpeed asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from longspan.errors import TopologyError
from longspan.mesh import Axis, Mesh


class AveragedSize(int):
    """The number of ranks of a sequence; as a divisor it is 1.

    DeepSpeed's stages 0, 1 and 2 divide the sum of gradients by `ranks / float(sequence size)`, so they add up over the
    ranks of a sequence and average over the others, while stage 3 averages over all. With a `float` of 1 every stage
    averages over all ranks, and one scaling of the loss is right for all of them.
    """

    def __float__(self) -> float:
        return 1.0


class MPU:
    """What `deepspeed.initialize(mpu=...)` takes: group, size and rank of each axis.

    ZeRO shards and reduces over `sequence_data` = dp x sp, all stages average gradients over it, and batch sizes count
    `data`. The group of the data axis is that of `sequence_data`: over it DeepSpeed shards the parameters of stage 3.

    Args:
        mesh: of a prepared model, such as `handle.mesh`.

    Raises:
        TopologyError: torch.distributed is not initialised, or the mesh leaves processes out.

    Cost: a group of one rank, made by that rank alone.
    """

    def __init__(self, mesh: Mesh) -> None:
        if not dist.is_initialized():
            raise TopologyError(
                "DeepSpeed needs torch.distributed, which is not initialised: start with `longspan train`, torchrun or "
                "deepspeed, and call torch.distributed.init_process_group before longspan.prepare."
            )
        if mesh.world.size != dist.get_world_size():
            raise TopologyError(
                f"DeepSpeed shards over all {dist.get_world_size()} processes, but the mesh has {mesh.world.size} of "
                "them: prepare the model on a mesh of all processes, or use engine fsdp2."
            )
        self.mesh = mesh
        rank = dist.get_rank()
        self._alone = dist.new_group([rank], use_local_synchronization=True)
        self._model = Axis(ranks=(rank,))

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of the ranks that share a sequence."""
        return self._group(self.mesh.sequence)

    def get_sequence_parallel_world_size(self) -> int:
        """Return sp; see `AveragedSize`."""
        return AveragedSize(self.mesh.sequence.size)

    def get_sequence_parallel_rank(self) -> int:
        """Return this process's place in its sequence."""
        return self.mesh.sequence.rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group that shards stage 3's parameters: dp x sp."""
        return self._group(self.mesh.world)

    def get_data_parallel_group_ranks(self) -> Sequence[int]:
        """Return the processes of that group."""
        return self.mesh.world.ranks

    def get_data_parallel_world_size(self) -> int:
        """Return dp, the number of batches at a time."""
        return self.mesh.data.size

    def get_data_parallel_rank(self) -> int:
        """Return which of these batches is this process's."""
        return self.mesh.data.rank

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of all ranks."""
        return self._group(self.mesh.world)

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return dp x sp."""
        return self.mesh.world.size

    def get_sequence_data_parallel_rank(self) -> int:
        """Return this process's place in that group."""
        return dist.get_rank(self._group(self.mesh.world))

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of this rank alone: models are not divided."""
        return self._group(self._model)

    def get_model_parallel_world_size(self) -> int:
        """Return 1."""
        return self._model.size

    def get_model_parallel_rank(self) -> int:
        """Return 0."""
        return self._model.rank

    def _group(self, axis: Axis) -> dist.ProcessGroup:
        return self._alone if axis.group is None else axis.group

"""The questions of `deepspeed.utils.groups` about sequence parallelism, without an engine or DeepSpeed."""

from __future__ import annotations

import torch.distributed as dist

from longspan.engines.mpu import MPU
from longspan.errors import TopologyError
from longspan.integrations.deepspeed.intercept import interceptions


def _get_sequence_parallel_group() -> dist.ProcessGroup:
    """Return the group of the ranks that share rows."""
    return _required().get_sequence_parallel_group()


def _get_sequence_parallel_world_size() -> int:
    """Return how many ranks share a row; 1 if nothing is registered."""
    mpu = _latest()
    return 1 if mpu is None else int(mpu.get_sequence_parallel_world_size())


def _get_sequence_parallel_rank() -> int:
    """Return this process's place among them; 0 if nothing is registered."""
    mpu = _latest()
    return 0 if mpu is None else mpu.get_sequence_parallel_rank()


def _get_sequence_data_parallel_group() -> dist.ProcessGroup:
    """Return the group over which gradients are reduced."""
    return _required().get_sequence_data_parallel_group()


def _get_sequence_data_parallel_world_size() -> int:
    """Return its size; that of all processes if nothing is registered."""
    mpu = _latest()
    return dist.get_world_size() if mpu is None else mpu.get_sequence_data_parallel_world_size()


def _get_sequence_data_parallel_rank() -> int:
    """Return this process's place in it."""
    mpu = _latest()
    return dist.get_rank() if mpu is None else mpu.get_sequence_data_parallel_rank()


def _get_data_parallel_world_size() -> int:
    """Return how many rows are worked on at a time."""
    mpu = _latest()
    return dist.get_world_size() if mpu is None else mpu.get_data_parallel_world_size()


def _get_data_parallel_rank() -> int:
    """Return which of these rows this process works on."""
    mpu = _latest()
    return dist.get_rank() if mpu is None else mpu.get_data_parallel_rank()


def _latest() -> MPU | None:
    """Return the groups of the last registration."""
    found = [each.mpu for interception in interceptions() for each in interception.registrations]
    return found[-1] if found else None


def _required() -> MPU:
    mpu = _latest()
    if mpu is None:
        raise TopologyError(
            "There is no sequence-parallel group: call UlyssesSPAttentionHF.register_with_transformers with a "
            "sequence_parallel_size above 1 first."
        )
    return mpu

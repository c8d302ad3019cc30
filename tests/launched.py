"""What DeepSpeed expects of the processes it runs in, for ranks of the pool."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def launched() -> Iterator[None]:
    """Have what launchers set, on CPUs, and count modules from 0 again: ranks must count alike, whatever ran before.
    Groups of an earlier case are gone."""
    before = dict(os.environ)
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), DS_ACCELERATOR="cpu")
    try:
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init
        from deepspeed.utils import groups

        register = inspect.unwrap(DeepSpeedZeRoOffload._register_deepspeed_module)
        register.__defaults__[0][0] = 0  # type: ignore[index]
        Init.param_id = 0
        groups.mpu = groups._WORLD_GROUP = None
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

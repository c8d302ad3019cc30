"""Offloaded checkpoints under DeepSpeed's name: host memory comes from its accelerator where DeepSpeed is in use."""

from __future__ import annotations

import importlib
import sys

import torch
from torch import Tensor

from longspan.offload import OffloadedCheckpoints, offload_checkpoints


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_bytes: int = 1024,
    max_fwd_stash_count: int = 2,
    max_cpu_buffer_pool_count: int = 64,
    keep_last_count: int = 1,
) -> OffloadedCheckpoints:
    """As `longspan.offload_checkpoints`; DeepSpeed, once imported, pins the memory and counts it in its statistics.

    Raises:
        ConfigError: also inside the context, where DeepSpeed locks memory that the device does not know of.
    """
    context = offload_checkpoints(
        use_pin_memory, use_streams, min_offload_bytes, max_fwd_stash_count, max_cpu_buffer_pool_count, keep_last_count
    )
    if "deepspeed" in sys.modules:
        context.pool.allocate = _by_accelerator
    return context


def _by_accelerator(nbytes: int, pinned: bool) -> Tensor:
    """Make host memory as DeepSpeed makes its own, by the backend that it is set to."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if not pinned:
        return memory
    return importlib.import_module("deepspeed.accelerator").get_accelerator().pin_memory(memory, make_copy=False)

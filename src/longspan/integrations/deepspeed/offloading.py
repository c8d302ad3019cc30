"""Offloaded checkpoints under DeepSpeed's name: host memory comes from its accelerator where DeepSpeed is in use."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from longspan.offload import OffloadedCheckpoints, offload_checkpoints


@functools.wraps(offload_checkpoints, assigned=())
def get_checkpoint_hidden_states_offloading_ctx_manager(*settings: Any, **named: Any) -> OffloadedCheckpoints:
    """As `longspan.offload_checkpoints`; DeepSpeed, once imported, pins the memory and counts it in its statistics.

    Raises:
        ConfigError: also inside the context, where DeepSpeed locks memory that the device does not know of.
    """
    if "deepspeed" in sys.modules:
        named.setdefault("allocate", _by_accelerator)
    return offload_checkpoints(*settings, **named)


def _by_accelerator(nbytes: int, pinned: bool) -> Tensor:
    """Make host memory as DeepSpeed makes its own, by the backend that it is set to."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if not pinned:
        return memory
    return importlib.import_module("deepspeed.accelerator").get_accelerator().pin_memory(memory, make_copy=False)

"""Pick an engine by name."""

from __future__ import annotations

import torch

from longspan.engines.ddp import DataParallel
from longspan.engines.fsdp import FullyShardedDataParallel
from longspan.engines.protocol import Engine
from longspan.engines.single import Single
from longspan.engines.zero import Zero
from longspan.errors import ConfigError

ENGINES = ("single", "ddp", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3")


def build_engine(name: str, world_size: int, compute_dtype: torch.dtype | None = None) -> Engine:
    """Return the engine of that name; "auto" is single for one process and fsdp2 for more.

    Raises:
        ConfigError: an unknown name, or a compute type that the engine cannot serve.
    """
    if name == "auto":
        name = "fsdp2" if world_size > 1 or compute_dtype is not None else "single"
    if name == "fsdp2":
        return FullyShardedDataParallel(compute_dtype)
    if name not in ENGINES:
        raise ConfigError(f"Unknown engine {name!r}; use auto, {', '.join(ENGINES)}.")
    if name.startswith("zero-"):
        return Zero(int(name[-1]), compute_dtype)
    if compute_dtype is not None:
        raise ConfigError(f"Engine {name} cannot run in another type than its parameters'; use fsdp2 or zero-3.")
    return DataParallel() if name == "ddp" else Single()

"""The optimizer of a workload."""

from __future__ import annotations

from typing import Any

from torch import nn

from longspan.bench.settings import Work
from longspan.engines import Engine
from longspan.optim import StepAfterBackward, StepInBackward, Stepping, build_optimizer


def build_stepping(work: Work, module: nn.Module, engine: Engine, max_norm: float) -> Stepping:
    """Make the optimizer that was asked for; alone and on the host, it steps inside backward.

    Raises:
        ConfigError: an optimizer that cannot serve the parameters.
    """
    optimizer: Any = build_optimizer(work.optimizer, module, lr=0.0)
    if work.in_backward:
        return StepInBackward(optimizer, max_norm)
    return StepAfterBackward(optimizer, engine, max_norm)

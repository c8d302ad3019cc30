"""The learning rate of each step."""

from __future__ import annotations

import math

from longspan.config import RunConfig


def learning_rate(step: int, config: RunConfig) -> float:
    """Return the learning rate of a step, counted from 1."""
    peak, schedule = config.optimizer.lr, config.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    done = (step - schedule.warmup_steps) / max(1, config.max_steps - schedule.warmup_steps)
    low = schedule.final_ratio
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))

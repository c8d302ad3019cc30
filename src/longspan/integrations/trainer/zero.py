"""DeepSpeed under a Trainer: what a prepared model needs before accelerate hands it over."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from longspan.engines.zero import check_version, let_stage3_gather
from longspan.errors import ConfigError
from longspan.integrations.transformers import Applied
from longspan.plan.setup import Optimizer


def check_zero(trainer: Any) -> None:
    """Refuse what longspan cannot keep exact under DeepSpeed.

    Raises:
        ConfigError: says what works.
    """
    check_version()
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    for name in ("sequence_parallel_size", "pipeline", "tensor_parallel", "data_parallel_size"):
        if config.get(name) not in (None, 1, {}):
            raise ConfigError(f"DeepSpeed's '{name}' divides what longspan divides: take it out of its configuration.")


def let_zero_hold(trainer: Any, handle: Applied) -> ExitStack:
    """Plan for what DeepSpeed will hold, and let stage 3 gather a layer's parameters at once; return what undoes it."""
    plugin = trainer.accelerator.state.deepspeed_plugin
    stage, config = plugin.zero_stage, plugin.deepspeed_config
    in_bf16 = trainer.args.bf16 or next(handle.model.parameters()).dtype == torch.bfloat16
    asked = config.get("data_types", {}).get("grad_accum_dtype")
    itemsize = 2 if in_bf16 else 4
    handle.held_by(f"zero-{stage}", Optimizer.under_zero(stage, itemsize, 4 if asked == "fp32" else itemsize))
    return let_stage3_gather(handle.model, handle.layers) if stage == 3 else ExitStack()

"""DeepSpeed under a Trainer: what a prepared model needs before accelerate hands it over."""

from __future__ import annotations

from typing import Any

from longspan.engines.zero import check_version, let_stage3_gather
from longspan.errors import ConfigError
from longspan.integrations.transformers import Applied


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


def let_zero3_gather_layers(trainer: Any, handle: Applied) -> None:
    """Have stage 3, if that is what the trainer runs, gather a layer's parameters at once."""
    if trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        let_stage3_gather(handle.model, handle.layers)

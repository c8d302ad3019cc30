"""DeepSpeed under a Trainer: what a prepared model needs before accelerate hands it over."""

from __future__ import annotations

import importlib.util
from typing import Any

from longspan.errors import ConfigError
from longspan.integrations.transformers.parts import Parts

_ENGINE = "longspan.engines.zero"


def check_zero(trainer: Any) -> None:
    """Refuse what longspan cannot keep exact under DeepSpeed.

    Raises:
        ConfigError: says what works.
    """
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    if importlib.util.find_spec(_ENGINE) is None:
        raise ConfigError("This version of longspan cannot work under DeepSpeed: use FSDP2.")
    importlib.import_module(_ENGINE).check_version()
    for name in ("sequence_parallel_size", "pipeline", "tensor_parallel", "data_parallel_size"):
        if config.get(name) not in (None, 1, {}):
            raise ConfigError(f"DeepSpeed's '{name}' divides what longspan divides: take it out of its configuration.")


def let_zero3_gather_layers(trainer: Any) -> None:
    """Have stage 3 gather a layer's parameters at once, and reduce its gradients once they are all there."""
    if trainer.accelerator.state.deepspeed_plugin.zero_stage != 3:
        return
    from deepspeed.utils import set_z3_leaf_modules

    model: Any = trainer.model
    parts = Parts.of(model)
    embedding = parts.embedding
    if not any(p.requires_grad for p in embedding.parameters()):
        model.enable_input_require_grads()  # or gradients of a layer would count as complete before its backward
    set_z3_leaf_modules(model, sorted({type(layer) for layer in parts.layers}, key=repr))

"""A model's own config, and the attention that it names."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.errors import ModelError


def own_config(model: nn.Module, config: PreTrainedConfig) -> None:
    """Give a model a copy of its config: models made from one config object share it, and so their attention's name."""
    own = copy.copy(config)
    copies = {id(config): own}
    for key in config.sub_configs:
        if (part := getattr(config, key)) is not None:
            copies[id(part)] = copy.copy(part)
            setattr(own, key, copies[id(part)])
    for module in model.modules():
        if id(vars(module).get("config")) in copies:
            module.config = copies[id(module.config)]  # type: ignore[assignment]


def use_attention(trunk: PreTrainedModel, name: str) -> None:
    """Switch the attention implementation of a model's text trunk; a vision tower keeps its own.

    Raises:
        ModelError: the trunk does not use the attention interface.
    """
    trunk.set_attn_implementation(name)
    if trunk.config._attn_implementation != name:
        raise ModelError(
            f"{type(trunk).__name__} does not call its attention through transformers' attention interface, so "
            "longspan cannot take part in it."
        )

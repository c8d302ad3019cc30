"""What shows in a model's configuration and modules, without its weights, to be wrong to divide."""

from __future__ import annotations

from typing import Any

from torch import nn

from longspan.errors import ModelError
from longspan.integrations.multimodal import sight_of
from longspan.stream.quantized import mixes_tokens

_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
"""Names under which configs of transformers keep the dropout of attention probabilities."""


def head_counts(config: Any) -> tuple[int, int]:
    """Return how many query and KV heads the attention of a configuration's text model has.

    Raises:
        ModelError: it names none.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ModelError(
            f"The config of {text.model_type} names no num_attention_heads, which sequence parallelism divides: "
            "longspan trains models whose layers call attention."
        )
    return heads, getattr(text, "num_key_value_heads", None) or heads


def refuse_settings(model: Any, layers: nn.ModuleList, layers_name: str) -> None:
    """Refuse parts and settings of a model under which it would not be exact; its weights may be on the meta device.

    Raises:
        ModelError: names the first of them.
    """
    config = model.config.get_text_config()
    if config is not model.config and sight_of(model) is None:
        kinds: Any = type(model.config).sub_configs
        towers = [name for name in kinds if name != "text_config"]
        raise ModelError(
            f"{type(model).__name__} has {' and '.join(towers) or 'further parts'} besides its text model; of "
            "multimodal models longspan divides Qwen2.5-VL and Qwen3-VL."
        )
    for name, module in model.named_modules():
        if reason := mixes_tokens(module):
            raise ModelError(
                f"{name} ({type(module).__name__}) uses {reason}: a part of a sequence, or a tile of it, would be "
                "computed in other numbers than the whole. Use scales per row or block, or weights quantised alone."
            )
    if shared := getattr(config, "num_kv_shared_layers", None):
        first = len(layers) - shared
        raise ModelError(
            f"{layers_name}.{first} ({type(layers[first]).__name__}) and all layers after it reuse the "
            f"keys and values of earlier layers (num_kv_shared_layers={shared}); longspan supports layers with "
            "keys and values of their own."
        )
    for name in _ATTENTION_DROPOUTS:
        if dropout := getattr(config, name, None):
            raise ModelError(
                f"The config sets {name}={dropout}, which no kernel here replays; set it to 0.0 (also on the modules "
                "of a model that exists already)."
            )

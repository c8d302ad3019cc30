"""Describe a transformers model for planning: its parameters are counted on the meta device, exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from longspan.config import AdapterConfig, ModelConfig
from longspan.errors import ConfigError, ModelError
from longspan.integrations.adapters import add_adapter
from longspan.integrations.models import load_model_config
from longspan.integrations.multimodal import decoder_layers, sight_of, text_trunk
from longspan.integrations.random_weights import auto_class
from longspan.integrations.refusals import head_counts, refuse_settings
from longspan.plan.kept import Operands
from longspan.plan.shapes import LayerShape, ModelShape
from longspan.stream.quantized import packed_size
from longspan.weights import whole_shape

_LAST_PRODUCT = re.compile(r"(^|\.)(down_proj|w2|fc2|c_proj|dense_4h_to_h|output_linear)(\.|$)")
_ATTENTION = re.compile(r"attn|attention|mixer")
_OUT = re.compile(r"(^|\.)(o_proj|out_proj|dense|c_proj|wo)(\.|$)")
_KEYS_VALUES = re.compile(r"(^|\.)(k_proj|v_proj)(\.|$)")
_FUSED = re.compile(r"(^|\.)(qkv_proj|query_key_value|c_attn|qkv|wqkv)(\.|$)")

_SHORT_WINDOW = 64
"""Keys that a token of a recurrent layer counts as, in place of all before it."""


def model_shape(
    model: str | PretrainedConfig | nn.Module,
    operands: Sequence[Operands] | None = None,
    adapter: AdapterConfig | None = None,
    name: str | None = None,
) -> ModelShape:
    """Return the shape of a model, given itself, its configuration, or a preset, folder or hub id.

    Args:
        operands: sizes of each layer's attention call, if they were seen; else they are read from the configuration.
        adapter: what is put into it, where it is not given itself.
        name: what a configuration is called; None for the name that it holds, or its type.

    Raises:
        ConfigError: there is no such model.
        ModelError: it is no causal language model with decoder layers that can be found.
    """
    if isinstance(model, nn.Module):
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
        return _describe(inner, getattr(inner, "name_or_path", "") or type(inner).__name__, operands)
    own = model if isinstance(model, str) else getattr(model, "name_or_path", "") or type(model).__name__
    called: str = name or own
    config = load_model_config(ModelConfig(name=model, init="random")) if isinstance(model, str) else model
    try:
        with torch.device("meta"):
            built = auto_class(config).from_config(config, trust_remote_code=False)
    except ConfigError as error:
        raise ModelError(f"{called} cannot be planned: {error}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{called} cannot be planned, as it is no causal language model of text: {reason}") from None
    if adapter is not None:
        return replace(model_shape(add_adapter(built, adapter, seed=0)), name=called)
    return _describe(built, called, operands)


def _describe(model: Any, name: str, operands: Sequence[Operands] | None) -> ModelShape:
    config = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None:
        raise ModelError(f"{name} cannot be planned: it has no head or no embedding.")
    layers_name, blocks = decoder_layers(model)
    refuse_settings(model, blocks, f"{text_trunk(model)[1]}.{layers_name}")
    seen = operands or [None] * len(blocks)
    layers = tuple(
        _layer(layer, config, operand or attention_sizes(config, i), layer_window(config, i))
        for i, (layer, operand) in enumerate(zip(blocks, seen, strict=True))
    )
    inside = {id(p) for p in blocks.parameters()}
    sight = sight_of(model)
    outside = [p for p in model.parameters() if id(p) not in inside]
    return ModelShape(
        name=name,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        layers=layers,
        outside=sum(whole_shape(p).numel() for p in outside),
        outside_trained=sum(whole_shape(p).numel() for p in outside if p.requires_grad),
        head=config.vocab_size * config.hidden_size,
        head_trained=sum(whole_shape(p).numel() for p in head.parameters() if p.requires_grad),
        edited=0 if sight is None else sight.stacked,
    )


@dataclass(frozen=True)
class _Heads:
    """Sizes of an attention call as a configuration gives them."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    recurrent: bool = False


def attention_sizes(config: Any, index: int) -> Operands:
    """Return the sizes of a layer's attention call, or of its recurrent mixer, as a configuration gives them."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] == "linear_attention" and hasattr(config, "linear_num_value_heads"):
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        return _Heads(values, keys, config.linear_key_head_dim, config.linear_value_head_dim, recurrent=True)
    if getattr(config, "is_heterogeneous", False):  # Gemma 4: the heads of a layer are told by a config of its own
        config = config.per_layer_config[index]
    heads, kv_heads = head_counts(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    value = getattr(config, "v_head_dim", None) or width
    rotated = getattr(config, "qk_rope_head_dim", None)
    if rotated:  # latent attention: every head has keys of its own
        return _Heads(heads, heads, rotated + config.qk_nope_head_dim, value)
    return _Heads(heads, kv_heads, width, value)


def expert_counts(config: Any) -> tuple[int, int]:
    """Return how many experts a layer has, and how many of them each token is sent to; 1 and 1 without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts"), ("num_experts_per_tok", "top_k_experts")
    experts, chosen = (next((n for key in keys if (n := getattr(config, key, None))), 1) for keys in names)
    return experts, chosen


def _layer(layer: nn.Module, config: Any, operands: Operands, window: int | None) -> LayerShape:
    """Count a layer's weights, sorted by what they are multiplied with."""
    query = operands.heads * operands.head_dim
    kv = operands.kv_heads * (operands.head_dim + operands.v_head_dim)
    experts, chosen = expert_counts(config)
    active = before = keys = down = mlp = 0.0
    weights, packed, packed_bytes = _weights(layer)
    for name, p, count in weights:
        if len(whole_shape(p)) < 2:
            continue
        own = count * (chosen / experts if re.search(r"\.experts\.", f".{name}") else 1)
        active += own
        if not _ATTENTION.search(name):
            mlp += own
            down += own if _LAST_PRODUCT.search(name) else 0
        elif not _OUT.search(name):
            before += own
            keys += own if _KEYS_VALUES.search(name) else own * kv / (query + kv) if _FUSED.search(name) else 0
    return LayerShape(
        heads=operands.heads,
        kv_heads=operands.kv_heads,
        head_dim=operands.head_dim,
        v_head_dim=operands.v_head_dim,
        intermediate=round(mlp / (3 * config.hidden_size)),
        parameters=sum(count for _, _, count in weights),
        active=round(active),
        query_key_value=round(before),
        key_value=round(keys),
        down=round(down),
        trained=sum(whole_shape(p).numel() for p in layer.parameters() if p.requires_grad),
        window=window,
        packed=packed,
        packed_bytes=packed_bytes,
        recurrent=operands.recurrent,
    )


def _weights(layer: nn.Module) -> tuple[list[tuple[str, nn.Parameter, int]], int, int]:
    """Return a layer's parameters with names and numbers, how many numbers are packed, and in how many bytes."""
    found, packed, packed_bytes = [], 0, 0
    sizes = {name: packed_size(module) for name, module in layer.named_modules()}
    for name, p in layer.named_parameters():
        place, _, own = name.rpartition(".")
        count, size = sizes[place] if own == "weight" else (0, 0)
        found.append((name, p, count or whole_shape(p).numel()))
        packed, packed_bytes = packed + count, packed_bytes + size
    return found, packed, packed_bytes


def layer_window(config: Any, index: int) -> int | None:
    """Return how far a layer sees back, where it does not see everything."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        if kinds[index] == "linear_attention":
            return _SHORT_WINDOW
        return config.sliding_window if kinds[index] == "sliding_attention" else None
    window = getattr(config, "sliding_window", None)
    return window if window and getattr(config, "use_sliding_window", True) else None

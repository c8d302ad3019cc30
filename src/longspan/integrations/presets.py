"""Model configurations that need no download: tiny ones to try things on, and the shapes of public models."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from longspan.errors import ConfigError


@dataclass(frozen=True)
class Preset:
    """A configuration by family and fields.

    Args:
        family: transformers' `model_type`.
        fields: what differs from the family's own defaults; text and vision parts of a multimodal model are nested.
    """

    family: str
    fields: Mapping[str, Any]


def preset_config(name: str, **overrides: Any) -> PretrainedConfig:
    """Return a fresh configuration; its weights are random by nature.

    Args:
        name: a key of `PRESETS`.
        overrides: fields to replace, those of the text part for a multimodal model; what the family derives from
            them (layer types, head size) follows.

    Raises:
        ConfigError: an unknown name or field, or values that do not fit together.
    """
    preset = PRESETS.get(name)
    if preset is None:
        near = difflib.get_close_matches(name, PRESETS, n=3)
        hint = f"Did you mean {', '.join(near)}?" if near else f"Presets: {', '.join(PRESETS)}."
        raise ConfigError(f"There is no preset named {name!r}. {hint}")
    fields = {key: _copied(value) for key, value in preset.fields.items()}
    known = AutoConfig.for_model(preset.family, **fields)
    text = known.get_text_config()
    names = {*text.to_dict(), *type(text).attribute_map}
    for key, value in overrides.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}: {type(text).__name__} has no field {key!r}.{hint}")
        fields.get("text_config", fields)[key] = value
    if not overrides:
        return known
    try:
        return AutoConfig.for_model(preset.family, **fields)
    except Exception as error:  # each family validates in its own way
        raise ConfigError(f"{name} cannot have {overrides}: {str(error).strip().splitlines()[-1].strip()}") from None


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    return list(value) if isinstance(value, list | tuple) else value


_TINY: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Small enough for one CPU core, with fewer KV heads than query heads and a vocabulary that holds all bytes."""

_SIX_HEADS: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
}
"""Heads that two and three ranks divide, with a single one's keys on two of four ranks."""

_SLIDING_FULL = ["sliding_attention", "full_attention"]

_TINY_GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24}

_TINY_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}

_TINY_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "factor": 2048.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
}
"""From the 65th position on other frequencies apply, so that short tests see both tables."""

_TINY_IMAGES: dict[str, Any] = {
    "image_token_id": 380,
    "video_token_id": 381,
    "vision_start_token_id": 382,
    "vision_end_token_id": 383,
}

_TINY_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}

_LLAMA3: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}


def _shape(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny-llama": Preset("llama", _TINY),
        "tiny-qwen2": Preset(
            "qwen2", {**_TINY, **_shape(96, 200, 2, 6), "num_key_value_heads": 3, "tie_word_embeddings": True}
        ),
        "tiny-qwen3": Preset("qwen3", {**_TINY, **_shape(72, 136, 2, 6), "head_dim": 24, "tie_word_embeddings": True}),
        "tiny-mistral": Preset("mistral", {**_TINY, **_shape(128, 224, 2, 8), "sliding_window": 24}),
        "tiny-phi3": Preset(
            "phi3",
            {**_TINY, "original_max_position_embeddings": 64, "rope_parameters": _LONGROPE, "sliding_window": None},
        ),
        "tiny-gemma2": Preset(
            "gemma2",
            {**_TINY, **_TINY_GEMMA, **_SIX_HEADS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        ),
        "tiny-gemma3": Preset(
            "gemma3_text",
            {**_TINY, **_TINY_GEMMA, **_shape(80, 172, 6, 5), "num_key_value_heads": 1},
        ),
        "tiny-gemma4": Preset(
            "gemma4_text",
            {
                **_TINY,
                **_TINY_GEMMA,
                "layer_types": _SLIDING_FULL,
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 48,
                "final_logit_softcapping": 3.0,
            },
        ),
        "tiny-gpt-oss": Preset(
            "gpt_oss",
            {
                **_TINY,
                **_SIX_HEADS,
                "intermediate_size": 72,
                "sliding_window": 24,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        "tiny-moe": Preset("qwen3_moe", {**_TINY, **_TINY_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
        "tiny-mixtral": Preset(
            "mixtral",
            {**_TINY, **_SIX_HEADS, "intermediate_size": 72, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        "tiny-olmoe": Preset(
            "olmoe",
            {**_TINY, "intermediate_size": 72, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
        ),
        "tiny-granite": Preset("granite", {**_TINY, "logits_scaling": 3.0, "residual_multiplier": 0.6}),
        "tiny-cohere2": Preset(
            "cohere2", {**_TINY, "layer_types": _SLIDING_FULL, "sliding_window": 24, "logit_scale": 0.5}
        ),
        "tiny-deepseek-v3": Preset(
            "deepseek_v3",
            {
                **_TINY,
                **_shape(96, 172, 2, 6),
                "num_key_value_heads": 6,
                "moe_intermediate_size": 48,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "q_lora_rank": 24,
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
            },
        ),
        "tiny-qwen3-next": Preset(
            "qwen3_next", {**_TINY, **_TINY_EXPERTS, **_TINY_LINEAR, "shared_expert_intermediate_size": 48}
        ),
        "tiny-qwen3.5": Preset("qwen3_5_text", {**_TINY, **_TINY_LINEAR}),
        "tiny-qwen2.5-vl": Preset(
            "qwen2_5_vl",
            {
                **_TINY_IMAGES,
                "text_config": {
                    **_TINY,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
                },
                "vision_config": {**_TINY_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
            },
        ),
        "tiny-qwen3-vl": Preset(
            "qwen3_vl",
            {
                **_TINY_IMAGES,
                "text_config": {
                    **_TINY,
                    "head_dim": 16,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 10_000.0,
                        "mrope_section": [4, 2, 2],
                        "mrope_interleaved": True,
                    },
                },
                "vision_config": {**_TINY_VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
            },
        ),
        "llama-1b": Preset(
            "llama",
            {
                **_LLAMA3,
                **_shape(2048, 8192, 16, 32),
                "rope_parameters": _llama3_rope(32.0),
                "tie_word_embeddings": True,
            },
        ),
        "llama-8b": Preset("llama", {**_LLAMA3, **_shape(4096, 14_336, 32, 32), "rope_parameters": _llama3_rope(8.0)}),
        "llama-70b": Preset("llama", {**_LLAMA3, **_shape(8192, 28_672, 80, 64), "rope_parameters": _llama3_rope(8.0)}),
        "qwen3-0.6b": Preset("qwen3", {**_QWEN3, **_shape(1024, 3072, 28, 16), "tie_word_embeddings": True}),
        "qwen3-8b": Preset("qwen3", {**_QWEN3, **_shape(4096, 12_288, 36, 32)}),
        "qwen3-32b": Preset("qwen3", {**_QWEN3, **_shape(5120, 25_600, 64, 64)}),
        "qwen3-30b-a3b": Preset(
            "qwen3_moe",
            {
                **_QWEN3,
                **_shape(2048, 6144, 48, 32),
                "num_key_value_heads": 4,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
            },
        ),
        "gpt-oss-20b": Preset(
            "gpt_oss",
            {
                **_shape(2880, 2880, 24, 64),
                "vocab_size": 201_088,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "max_position_embeddings": 131_072,
                "eos_token_id": 200_002,
                "pad_token_id": 199_999,
            },
        ),
    }
)
"""Presets by name. Source of the public shapes: the published config.json of each model."""

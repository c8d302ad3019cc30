"""Rotary position embeddings that a run replaces, and how far a model's positions reach."""

from __future__ import annotations

import difflib
from typing import Any

from transformers import PretrainedConfig

from longspan.config import RopeConfig
from longspan.errors import ConfigError

_OPTIONS = {
    "linear": (),
    "dynamic": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}
_NEEDED = {"llama3": ("low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
_REMEMBERS = ("yarn", "llama3", "longrope")
"""Types that keep the positions of pre-training beside their factor."""


def rope_fields(config: PretrainedConfig, rope: RopeConfig) -> dict[str, Any]:
    """Return the fields of a model's config that a run's `model.rope` replaces.

    Raises:
        ConfigError: the model has no rotary embeddings, or a table of them per kind of layer; or options that the
            type does not have.
    """
    if not rope.given:
        return {}
    own = getattr(config, "rope_parameters", None)
    if not own or config.get_text_config() is not config:
        raise ConfigError(f"model.rope: {type(config).__name__} has no rope_parameters of its own to replace.")
    if any(isinstance(value, dict) for value in own.values()):
        raise ConfigError(
            f"model.rope: {type(config).__name__} has rotary parameters for each kind of layer "
            f"({', '.join(own)}); set model.overrides.rope_parameters as a whole."
        )
    theta = {"rope_theta": rope.theta or own.get("rope_theta")}
    if rope.type is None:
        return {"rope_parameters": {**own, **theta}}
    kept = {key: own[key] for key in ("partial_rotary_factor",) if key in own}
    if rope.type == "default":
        return {"rope_parameters": {"rope_type": "default", **theta, **kept}}
    assert rope.factor is not None
    _check_options(rope)
    trained = rope.original_max_position_embeddings or own.get("original_max_position_embeddings")
    trained = trained or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    parameters = {"rope_type": rope.type, "factor": rope.factor, **theta, **kept, **rope.options}
    if rope.type == "dynamic":
        return {"rope_parameters": parameters}
    fields: dict[str, Any] = {"max_position_embeddings": int(rope.factor * trained)}
    if rope.type in _REMEMBERS:
        parameters["original_max_position_embeddings"] = trained
        if hasattr(config, "original_max_position_embeddings"):
            fields["original_max_position_embeddings"] = trained
    return {**fields, "rope_parameters": parameters}


def window_tokens(config: PretrainedConfig) -> int | None:
    """Return how many positions a model knows; None if it sets no limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rope: Any = getattr(text, "rope_parameters", None) or {}
    if positions is not None and rope.get("rope_type") == "dynamic":
        return int(positions * rope["factor"])
    return positions


def window_advice(config: PretrainedConfig, longest_tokens: int) -> str:
    """Say how to let a model take longer documents than it knows positions for."""
    text = config.get_text_config()
    rope: Any = getattr(text, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or text.max_position_embeddings
    factor = next(f for f in (1.5, 2, 4, 8, 16, 32, 64, 128, longest_tokens) if f * trained >= longest_tokens)
    return (
        f"Shorten sequence_length, stretch the model's rotary embeddings (model.rope: {{type: yarn, factor: "
        f"{factor:g}}}), or, for a model with random weights, set model.overrides: {{max_position_embeddings: "
        f"{longest_tokens}}}."
    )


def _check_options(rope: RopeConfig) -> None:
    known = _OPTIONS[str(rope.type)]
    for name in rope.options.keys() - set(known):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"It has: {', '.join(known) or 'none'}."
        raise ConfigError(f"model.rope.options: type {rope.type} has no option {name!r}. {hint}")
    missing = [name for name in _NEEDED.get(str(rope.type), ()) if name not in rope.options]
    if missing:
        raise ConfigError(f"model.rope.options: type {rope.type} needs {' and '.join(missing)}.")

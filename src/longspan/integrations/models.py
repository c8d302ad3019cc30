"""Build the model that a run names: a preset, a folder or a hub id, with fields of its config replaced."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from longspan.config import ModelConfig, parse_size
from longspan.errors import ConfigError
from longspan.integrations.positions import rope_fields, window_advice, window_tokens
from longspan.integrations.presets import PRESETS, preset_config
from longspan.integrations.random_weights import auto_class


def load_model_config(model: ModelConfig) -> PretrainedConfig:
    """Return the model's own config with the run's overrides.

    Raises:
        ConfigError: no such model, an override of a field it does not have, or values that do not fit together.
    """
    config = _own_config(model)
    rope = rope_fields(config, model.rope)
    if not rope:
        return config
    return _checked(lambda: type(config).from_dict({**copy.deepcopy(config.to_dict()), **rope}), rope, model.name)


def _own_config(model: ModelConfig) -> PretrainedConfig:
    """Return the model's config with the run's overrides."""
    if model.name in PRESETS:
        if model.init == "pretrained":
            raise ConfigError(
                f"model.name: {model.name} is a preset, which has no weights to load. Set model.init: random, or give "
                "a folder or hub id."
            )
        overrides = _with_sizes(model.overrides, preset_config(model.name).get_text_config())
        return _checked(lambda: preset_config(model.name, **overrides), overrides, model.name)
    config = _read_config(model.name)
    fields = config.to_dict()
    for name in model.overrides.keys() - fields.keys():
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"model.overrides: {type(config).__name__} has no field {name!r}.{hint}")
    if not model.overrides:
        return config
    overrides = _with_sizes(model.overrides, config)
    return _checked(lambda: type(config).from_dict(_with_derived(config, overrides)), overrides, model.name)


def build_model(
    model: ModelConfig, seed: int, tokenizer: PreTrainedTokenizerBase | None = None, blank: bool = False
) -> PreTrainedModel:
    """Build the model on the CPU, with the same weights on every process.

    Args:
        seed: of random weights.
        tokenizer: a model with random weights takes over its end-of-text id.
        blank: build it on the meta device, without any weights.

    Raises:
        ConfigError: no such model, or its weights cannot be loaded.
    """
    config = load_model_config(model)
    dtype = getattr(torch, model.dtype)
    if model.init == "random":
        if tokenizer is not None:
            config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        torch.manual_seed(seed)
    if model.init == "random" or blank:
        # drawing nothing must not move on what random numbers come next
        with ExitStack() as stack:
            if blank:
                stack.enter_context(torch.random.fork_rng(devices=()))
                stack.enter_context(torch.device("meta"))
            return auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    try:
        return auto_class(config).from_pretrained(
            model.name, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"model.name: cannot load {model.name!r}: {_first_line(error)}") from None


def check_fit(config: PretrainedConfig, longest_tokens: int, largest_id: int) -> None:
    """Refuse documents that the model has no positions for and tokens that it has no embedding for.

    Args:
        longest_tokens: longest document (positions restart with each).
        largest_id: largest token id of the data.

    Raises:
        ConfigError: either of them.
    """
    text = config.get_text_config()
    positions = window_tokens(config)
    if positions is not None and longest_tokens > positions:
        raise ConfigError(
            f"The longest document has {longest_tokens:,} tokens, more than the {positions:,} positions that the model "
            f"knows (max_position_embeddings). {window_advice(config, longest_tokens)}"
        )
    if largest_id >= text.vocab_size:
        raise ConfigError(
            f"The data holds token id {largest_id:,}, but the model's vocabulary ends at {text.vocab_size - 1:,}. "
            "Use the model's own tokenizer, or set model.overrides.vocab_size for a model with random weights."
        )


def write_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, state: dict[str, Tensor]
) -> None:
    """Write weights (safetensors), config and tokenizer so that `from_pretrained(folder)` reads them."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()


def _read_config(name: str) -> PretrainedConfig:
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.8)
    if near and not Path(name).exists():
        raise ConfigError(f"model.name: {name!r} is neither a preset nor a folder. Did you mean the preset {near[0]}?")
    path = Path(name)
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or len(path.parts) != 2 or path.parent.is_dir()
    if looks_like_path and len(path.parts) > 1 and not path.is_dir():
        raise ConfigError(f"model.name: there is no folder {name!r} (and it is no preset).")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, StrictDataclassError) as error:
        if "custom code" in str(error):
            raise ConfigError(
                f"model.name: cannot load {name!r}: it needs code that comes with it, which longspan never runs "
                "(trust_remote_code). Take a model of a family that transformers has itself."
            ) from None
        raise ConfigError(f"model.name: cannot load {name!r}: {_first_line(error)}") from None
    for part in (config, config.get_text_config()):
        if "/" in str(part._attn_implementation):
            raise ConfigError(
                f"model.name: the config of {name!r} asks for {part._attn_implementation}, an attention kernel of the "
                "Hub, which is code that comes with a model: take attn_implementation out of its config.json."
            )
    return config


def _checked(build: Callable[[], PretrainedConfig], fields: dict[str, Any], name: str) -> PretrainedConfig:
    try:
        return build()
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[-1].strip() if str(error).strip() else type(error).__name__
        raise ConfigError(f"model: the fields {fields} do not fit {name}: {reason}.") from None


def _with_sizes(overrides: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Read sizes, such as 128K and 1M, where the config's own field is a whole number."""
    read = dict(overrides)
    for name, value in overrides.items():
        own = getattr(config, name, None)
        if isinstance(value, str) and isinstance(own, int) and not isinstance(own, bool):
            with suppress(ValueError):  # what is no size is refused by the config itself
                read[name] = parse_size(value)
    return read


def _with_derived(config: PretrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    # Per-layer lists and the head size follow from fields that the user changed, unless given too.
    fields = {**copy.deepcopy(config.to_dict()), **overrides}
    if "num_hidden_layers" in overrides and "layer_types" not in overrides and fields.get("layer_types"):
        fields["layer_types"] = _cycled(fields["layer_types"], fields["num_hidden_layers"])
    text = config.get_text_config()
    followed = getattr(config, "head_dim", None) == text.hidden_size // text.num_attention_heads
    if followed and "head_dim" not in overrides:
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    return fields


def _cycled(values: list[Any], length: int) -> list[Any]:
    return [values[i % len(values)] for i in range(length)]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]

"""Small random-weight models of a given configuration: few layers, and narrow where full width would not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from longspan.config import AdapterConfig
from longspan.errors import ConfigError
from longspan.integrations.adapters import add_adapter

_SEED = 11
_NARROW = {"vocab_size": 512, "intermediate_size": 256, "moe_intermediate_size": 64}
_HIDDEN = 128
_UPDATE = 0.5  # size of what an adapter adds, as a share of what its module returns
_LOG_DECAY = ".A_log"  # of recurrent layers: softplus(...) * exp(A_log) is what a token's state loses, in nats
_ROUTER_BIAS = ".e_score_correction_bias"


def few_layers(config: PretrainedConfig, layers: int | None = None) -> PretrainedConfig:
    """Return a configuration with its first layers only.

    Args:
        layers: how many; None for 2, or more if it takes more to see each kind of layer.

    Raises:
        ConfigError: the model has fewer.
    """
    text = config.get_text_config()
    total = getattr(text, "num_hidden_layers", None)
    if not total:
        raise ConfigError(
            f"{type(config).__name__} has no num_hidden_layers; it is no configuration of a language model."
        )
    kinds = getattr(text, "layer_types", None) or [None] * total
    enough = min(max(2, 1 + max(kinds.index(kind) for kind in set(kinds))), total)
    count = enough if layers is None else layers
    if not 1 <= count <= total:
        raise ConfigError(f"The model has {total} layers; take 1 to {total} of them, not {count}.")
    fields, part = _fields(config)
    for name, value in part.items():
        if isinstance(value, list) and len(value) == total and name != "mlp_only_layers":
            part[name] = value[:count]
    part[_own_name(text, "num_hidden_layers")] = count
    if isinstance(own := part.get("per_layer_config"), Mapping):
        part["per_layer_config"] = {key: value for key, value in own.items() if int(key) < count}
    if (part.get("first_k_dense_replace") or 0) >= count > 1:
        part["first_k_dense_replace"] = count - 1  # else no layer would have experts
    return _rebuilt(config, fields)


def narrowed(config: PretrainedConfig) -> tuple[PretrainedConfig, dict[str, int]]:
    """Return a configuration of little width with the same heads, and the widths that changed.

    Head counts and head sizes stay, since these are what sequence parallelism divides; the vocabulary, the MLP and,
    where the family lets heads have a size of their own, the residual stream shrink.

    Raises:
        ConfigError: the family does not allow it.
    """
    text = config.get_text_config()
    changes = {name: most for name, most in _NARROW.items() if _exceeds(getattr(text, name, None), most)}
    heads, hidden = getattr(text, "num_attention_heads", None) or 1, text.hidden_size
    width = heads * -(-_HIDDEN // heads)
    if hidden > width:
        every = {**changes, "hidden_size": width, "head_dim": getattr(text, "head_dim", None) or hidden // heads}
        with contextlib.suppress(ConfigError):
            narrow = _with_widths(config, every)
            if hasattr(text, "head_dim") or _runs(narrow):
                return narrow, {**changes, "hidden_size": width}
    return _with_widths(config, changes), changes


def _runs(config: PretrainedConfig) -> bool:
    """Whether the model of a configuration runs; some families compute parts of a head's size from other widths."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = untrained_model(config, 0, torch.float32, torch.device("cpu"))
        try:
            model(input_ids=torch.zeros(1, 2, dtype=torch.long))
        except Exception:  # families fail in their own ways
            return False
    return True


def _exceeds(width: Any, most: int) -> bool:
    return isinstance(width, int) and width > most  # some families list one per layer


def _with_widths(config: PretrainedConfig, widths: Mapping[str, int]) -> PretrainedConfig:
    text = config.get_text_config()
    fields, part = _fields(config)
    part.update({_own_name(text, name): value for name, value in widths.items()})
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(part.get(name), int) and part[name] >= widths.get("vocab_size", text.vocab_size):
            part[name] = None
    return _rebuilt(config, fields)


def parameter_count(config: PretrainedConfig) -> int:
    """Return the number of parameters of a configuration's model. Cost: builds it without memory."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, adapter: AdapterConfig | None = None
) -> PreTrainedModel:
    """Build a model whose random weights leave no part of it idle, the same on every process.

    Matrices are drawn so that activations keep their size, vectors (norms, biases) are moved off their constants:
    attention weights then differ from token to token and biases take part, also those with which routers choose. The
    decay of recurrent layers is slow enough to carry a state over many tokens. Dropout is off.

    Args:
        adapter: put into the model, which is frozen. Both of its factors are drawn: with the zeros that training starts
            from, the first would get no gradient.

    Raises:
        ConfigError: the configuration does not make a model, or PEFT cannot adapt it.
    """
    torch.manual_seed(_SEED)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    if dtype is torch.float64 and has_experts(config):
        options["experts_implementation"] = "eager"  # PyTorch's grouped products know no float64
    try:
        with torch.device(device):
            model = auto_class(config).from_config(config, **options)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{type(config).__name__} does not make a model: {error}") from error
    if adapter is not None and adapter.kind != "none":
        adapted: Any = add_adapter(model, adapter, _SEED)
        model = adapted.get_base_model()
    generator = torch.Generator(device).manual_seed(_SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(lively(name, torch.empty_like(parameter).normal_(generator=generator), parameter))
            if adapter is not None and ".lora_B." in name:
                parameter.mul_(_UPDATE * adapter.rank / adapter.alpha)
        for name, buffer in model.named_buffers():
            if name.endswith(_ROUTER_BIAS):
                buffer.normal_(generator=generator).mul_(0.1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def lively(name: str, noise: Tensor, constant: Tensor | float) -> Tensor:
    """Return random values for a parameter, see `random_model`.

    Args:
        noise: of its shape, from a normal distribution; it becomes these values.
        constant: what vectors are moved off.
    """
    if name.endswith(_LOG_DECAY):
        return noise.mul_(0.5).sub_(2)
    if noise.ndim >= 2:
        return noise.mul_(noise.shape[-1] ** -0.5)
    return noise.mul_(0.1).add_(constant)


def untrained_model(config: PretrainedConfig, seed: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build a model on its device with the weights that its family starts training from, the same on every process.

    Raises:
        ConfigError: the configuration does not make a causal language model.
    """
    torch.manual_seed(seed)
    try:
        with torch.device(device):
            model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{type(config).__name__} does not make a causal language model: {error}") from error
    return model.train()


def chooses_rope_by_length(config: PretrainedConfig) -> bool:
    """Tell whether rotary frequencies depend on the largest position of a batch (LongRoPE, dynamic NTK)."""
    rope: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    return any(table.get("rope_type") in ("dynamic", "longrope") for table in tables)


def reach_tokens(config: PretrainedConfig) -> int | None:
    """Return how many tokens after one depend on it, if all layers attend within windows; None for all tokens."""
    text: Any = config.get_text_config()
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    if not window or not getattr(text, "use_sliding_window", True) or (kinds and set(kinds) != {"sliding_attention"}):
        return None
    return text.num_hidden_layers * (window - 1)


def has_experts(config: PretrainedConfig) -> bool:
    """Tell whether the model routes tokens to experts."""
    text = config.get_text_config()
    return any(
        (getattr(text, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )


def plain_attention(model: PreTrainedModel) -> str:
    """Return transformers' own attention that computes what the model means: `sdpa`, or `eager` where that cannot."""
    softcap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if softcap or not getattr(model, "_supports_sdpa", False) else "sdpa"


def _fields(config: PretrainedConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all fields of a configuration, and those among them that describe its text model."""
    fields = config.to_dict()
    return fields, fields.get("text_config", fields)


def _own_name(text: PretrainedConfig, name: str) -> str:
    """Return what the family calls a field."""
    names: Mapping[str, str] = type(text).attribute_map
    return names.get(name, name)


def _rebuilt(config: PretrainedConfig, fields: dict[str, Any]) -> PretrainedConfig:
    try:
        return type(config).from_dict(fields)
    except Exception as error:  # each family validates in its own way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise ConfigError(f"{type(config).__name__} cannot be made smaller: {reason}") from None


def auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class that has a language-modelling head for this family."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    raise ConfigError(f"transformers has no language model for {type(config).__name__} ({config.model_type}).")

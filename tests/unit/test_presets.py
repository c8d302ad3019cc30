"""Presets: every name makes the model it promises, and is what it was once it has been prepared and given back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GPTJConfig, GPTNeoXConfig, PretrainedConfig, PreTrainedModel, T5Config

from longspan.errors import ConfigError
from longspan.integrations.presets import PRESETS, preset_config
from longspan.integrations.random_weights import (
    chooses_rope_by_length,
    few_layers,
    has_experts,
    narrowed,
    parameter_count,
    random_model,
)
from longspan.integrations.transformers import prepare

TINY = [name for name in PRESETS if name.startswith("tiny-")]
BILLIONS = {
    "llama-1b": 1.236,
    "llama-8b": 8.030,
    "llama-70b": 70.554,
    "qwen3-0.6b": 0.596,
    "qwen3-8b": 8.191,
    "qwen3-32b": 32.762,
    "qwen3-30b-a3b": 30.532,
    "gpt-oss-20b": 20.915,
}
CPU = torch.device("cpu")


def heads(config: PretrainedConfig) -> tuple[int, int, int]:
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_attention_heads, text.num_key_value_heads, size


def state(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "attributes": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "attention": copy.copy(model.config._attn_implementation),
        "training": [module.training for module in model.modules()],
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    }


def test_every_promised_preset_exists() -> None:
    promised = "llama qwen2 qwen3 mistral phi3 gemma2 gemma3 gpt-oss moe mixtral deepseek-v3 qwen3-next qwen3.5"
    further = "gemma4 olmoe granite cohere2"
    families = [*promised.split(), "qwen2.5-vl", "qwen3-vl", *further.split()]
    assert set(TINY) == {f"tiny-{name}" for name in families}
    assert set(PRESETS) - set(TINY) == set(BILLIONS)


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_public_shapes_have_the_published_size(name: str, billions: float) -> None:
    assert parameter_count(preset_config(name)) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("name", TINY)
def test_tiny_presets_are_tiny_and_run(name: str) -> None:
    config = preset_config(name)
    text = config.get_text_config()
    assert text.vocab_size == 384
    assert text.pad_token_id < text.vocab_size
    model = random_model(config, torch.float32, CPU)
    assert sum(p.numel() for p in model.parameters()) < 500_000
    logits = model(input_ids=torch.arange(70)[None], use_cache=False).logits
    assert logits.shape == (1, 70, 384)
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("name", TINY)
def test_tiny_presets_are_prepared_and_given_back(name: str) -> None:
    model = random_model(preset_config(name), torch.float32, CPU)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    ids = torch.arange(70)[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    before = state(model)
    prepare(model).remove()
    assert state(model) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)


def test_presets_differ_in_what_matters() -> None:
    assert heads(preset_config("tiny-llama")) == (4, 2, 16)
    assert heads(preset_config("tiny-qwen2"))[:2] == (6, 3)
    assert heads(preset_config("tiny-qwen3"))[2] * 6 != preset_config("tiny-qwen3").hidden_size
    assert preset_config("tiny-mistral").sliding_window == 24
    assert not preset_config("tiny-moe").output_router_logits
    assert [name for name in PRESETS if chooses_rope_by_length(preset_config(name))] == ["tiny-phi3"]
    moe = {"tiny-gpt-oss", "tiny-moe", "tiny-mixtral", "tiny-deepseek-v3", "tiny-qwen3-next", "tiny-olmoe"}
    moe.add("tiny-gemma4")
    assert {name for name in TINY if has_experts(preset_config(name))} == moe


def test_phi3_uses_both_of_its_tables() -> None:
    model = random_model(preset_config("tiny-phi3"), torch.float32, CPU)
    ids = torch.arange(80)[None]
    short = model(input_ids=ids[:, :64], use_cache=False).logits
    long = model(input_ids=ids, use_cache=False).logits[:, :64]
    assert not torch.allclose(short, long, atol=1e-3)


def test_configs_are_fresh_and_take_overrides() -> None:
    first = preset_config("tiny-gemma3", num_hidden_layers=3, sliding_window=7)
    assert first.layer_types == ["sliding_attention"] * 3
    assert first.sliding_window == 7
    assert preset_config("tiny-gemma3").num_hidden_layers == 6
    preset_config("tiny-phi3").rope_parameters["short_factor"].append(2.0)
    assert len(preset_config("tiny-phi3").rope_parameters["short_factor"]) == 6
    assert heads(preset_config("tiny-llama", num_attention_heads=8)) == (8, 2, 8)
    assert preset_config("tiny-qwen2.5-vl", num_hidden_layers=1).get_text_config().num_hidden_layers == 1


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("tiny-lama", {}, r"no preset named 'tiny-lama'. Did you mean tiny-llama"),
        ("?", {}, r"Presets: tiny-llama, tiny-qwen2"),
        ("tiny-llama", {"hiden_size": 3}, r"LlamaConfig has no field 'hiden_size'. Did you mean hidden_size\?"),
        ("tiny-llama", {"hidden_size": 65}, r"tiny-llama cannot have \{'hidden_size': 65\}.*multiple"),
        ("tiny-llama", {"hidden_size": "wide"}, r"tiny-llama cannot have \{'hidden_size': 'wide'\}"),
    ],
)
def test_bad_names_and_values_are_config_errors(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preset_config(name, **overrides)


def test_few_layers_shows_each_kind_of_layer() -> None:
    assert few_layers(preset_config("llama-8b")).num_hidden_layers == 2
    assert few_layers(preset_config("tiny-gemma3")).layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert few_layers(preset_config("gpt-oss-20b")).layer_types == ["sliding_attention", "full_attention"]
    dense_first = few_layers(preset_config("tiny-deepseek-v3", num_hidden_layers=5, first_k_dense_replace=3))
    assert (dense_first.num_hidden_layers, dense_first.first_k_dense_replace) == (2, 1)
    assert few_layers(preset_config("tiny-qwen3-vl"), 1).get_text_config().num_hidden_layers == 1
    with pytest.raises(ConfigError, match=r"has 2 layers; take 1 to 2 of them, not 3"):
        few_layers(preset_config("tiny-llama"), 3)


@pytest.mark.parametrize("name", ["llama-8b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_narrowed_models_keep_their_heads(name: str) -> None:
    config = few_layers(preset_config(name))
    small, changes = narrowed(config)
    assert heads(small) == heads(config)
    assert changes["vocab_size"] == small.vocab_size == 512
    assert small.hidden_size == changes["hidden_size"] < config.hidden_size
    assert parameter_count(small) < 10_000_000
    logits = random_model(small, torch.float32, CPU)(input_ids=torch.arange(9)[None], use_cache=False).logits
    assert logits.shape == (1, 9, 512)


@pytest.mark.parametrize(
    "config",
    [GPTNeoXConfig(hidden_size=1536, num_attention_heads=64), GPTJConfig(n_embd=512, n_head=16, rotary_dim=16)],
)
def test_widths_stay_where_heads_would_not(config: PretrainedConfig) -> None:
    """A share of a head's size is rotated, and the family counts it from the width of the residual stream."""
    small, changes = narrowed(few_layers(config))
    assert small.hidden_size == config.hidden_size and changes["vocab_size"] == 512 and "hidden_size" not in changes
    assert random_model(small, torch.float32, CPU)(input_ids=torch.arange(9)[None]).logits.shape == (1, 9, 512)


def test_what_cannot_be_made_small_is_refused() -> None:
    config = preset_config("tiny-llama")
    config.num_attention_heads = 3
    with pytest.raises(ConfigError, match=r"LlamaConfig cannot be made smaller: .*(multiple|heads)"):
        few_layers(config)
    with pytest.raises(ConfigError, match=r"T5Config has no num_hidden_layers|transformers has no language model"):
        parameter_count(few_layers(T5Config()))


def test_random_weights_leave_nothing_idle_and_repeat() -> None:
    first, second = (random_model(preset_config("tiny-qwen2"), torch.float64, CPU) for _ in range(2))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        assert len(parameter.unique()) > 1, name

"""Models by name: presets, folders, overrides, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longspan.config import ModelConfig
from longspan.errors import ConfigError
from longspan.integrations.models import build_model, check_fit, load_model_config, write_pretrained
from longspan.integrations.tokenizer import byte_tokenizer


def named(name: str = "tiny-llama", init: str = "random", **options: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, "init": init, **options})


def test_random_weights_come_from_the_seed() -> None:
    first, again, other = (build_model(named(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert {p.dtype for p in build_model(named(dtype="bfloat16"), 1).parameters()} == {torch.bfloat16}


def test_saved_and_loaded_the_model_is_the_same_and_keeps_its_overrides(tmp_path: Path) -> None:
    model = build_model(named(overrides={"num_hidden_layers": 1, "vocab_size": 257}), 3, byte_tokenizer())
    write_pretrained(model, byte_tokenizer(), tmp_path, model.state_dict())
    loaded = build_model(named(str(tmp_path), "pretrained"), 0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert (loaded.config.num_hidden_layers, loaded.config.vocab_size) == (1, 257)
    assert loaded.config.eos_token_id == 256
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.architectures == ["LlamaForCausalLM"]


def test_overrides_of_a_folder(tmp_path: Path) -> None:
    config = load_model_config(named())
    config.save_pretrained(tmp_path)
    width = config.hidden_size // config.num_attention_heads
    changed = load_model_config(named(str(tmp_path), overrides={"hidden_size": 2 * config.hidden_size}))
    assert changed.hidden_size == 2 * config.hidden_size
    assert changed.head_dim == (2 * width if config.head_dim == width else config.head_dim)
    with pytest.raises(ConfigError, match="has no field 'hiden_size'. Did you mean hidden_size?"):
        load_model_config(named(str(tmp_path), overrides={"hiden_size": 8}))
    with pytest.raises(ConfigError, match="do not fit"):
        load_model_config(named(str(tmp_path), overrides={"hidden_size": "wide"}))


def test_overrides_take_sizes_where_a_field_is_a_whole_number(tmp_path: Path) -> None:
    load_model_config(named()).save_pretrained(tmp_path)
    for name in ("tiny-llama", str(tmp_path)):
        config = load_model_config(named(name, overrides={"max_position_embeddings": "1M", "hidden_act": "relu"}))
        assert (config.max_position_embeddings, config.hidden_act) == (2**20, "relu")
        with pytest.raises(ConfigError, match="1MB"):
            load_model_config(named(name, overrides={"max_position_embeddings": "1MB"}))


@pytest.mark.parametrize("overrides", [{"hiden_size": 8}, {"hidden_size": "wide"}, {"name": 3}])
def test_overrides_of_a_preset_that_cannot_be(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tiny-llama"):
        load_model_config(named(overrides=overrides))


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load"):
        load_model_config(named(str(tmp_path)))
    with pytest.raises(ConfigError, match="Did you mean the preset tiny-llama?"):
        load_model_config(named("tinyllama"))
    with pytest.raises(ConfigError, match="has no weights"):
        load_model_config(named(init="pretrained"))
    load_model_config(named()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot load"):
        build_model(named(str(tmp_path), "pretrained"), 0)


def test_data_that_does_not_fit_the_model() -> None:
    config = load_model_config(named(overrides={"max_position_embeddings": 100, "vocab_size": 300}))
    check_fit(config, longest_tokens=100, largest_id=299)
    with pytest.raises(ConfigError, match="101 tokens, more than the 100 positions that the model knows"):
        check_fit(config, longest_tokens=101, largest_id=0)
    with pytest.raises(ConfigError, match="token id 300, but the model's vocabulary ends at 299"):
        check_fit(config, longest_tokens=1, largest_id=300)


@pytest.mark.parametrize("name", ["./no/such/model", "/nowhere/model", "a/b/c"])
def test_a_missing_folder_is_called_one(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        load_model_config(ModelConfig(name=name))

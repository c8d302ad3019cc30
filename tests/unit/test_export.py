"""Runs that train adapters: what they save, what `longspan export` makes of it, and positions beyond pre-training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from longspan.check.float64 import float64_throughout
from longspan.config import ModelConfig
from longspan.errors import ConfigError
from longspan.integrations.models import build_model, check_fit, load_model_config
from longspan.integrations.positions import window_tokens
from longspan.integrations.saved import merged_model
from longspan.integrations.tokenizer import byte_tokenizer
from longspan.train import loop
from test_cli_errors import TINY, expect_error, longspan, run_file

pytest.importorskip("peft")

IDS = torch.randint(257, (2, 70), generator=torch.Generator().manual_seed(3))
SMALL = {**TINY, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 257}


@pytest.fixture
def wide() -> Iterator[None]:
    """Build and run models in float64 throughout: what differs at all shows."""
    with float64_throughout():
        yield


def model_of(**changes: Any) -> dict[str, Any]:
    overrides = {**SMALL, **changes.pop("overrides", {})}
    return {"name": "tiny-llama", "init": "random", "dtype": "float64", "overrides": overrides, **changes}


def trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, adapter: dict[str, Any], model: dict[str, Any], **changes: Any
) -> Tensor:
    """Train adapters on the command line, and return the logits of the model as it was trained."""
    kept: list[nn.Module] = []
    save = loop.save_model

    def saving(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        kept.append(model)
        save(model, *args, **kwargs)

    monkeypatch.setattr(loop, "save_model", saving)
    values = {
        "model": model,
        "adapter": {"kind": "lora", "rank": 3, "alpha": 9, **adapter},
        "memory": {"keep": "x+O", "tile_tokens": 24},
        "optimizer": {"lr": 0.05},
        "max_steps": 3,
        **changes,
    }
    code, _, err = longspan("train", run_file(folder, **values))
    assert code == 0, err
    (model_,) = kept
    handle = model_.get_base_model()._longspan_applied  # type: ignore[operator,union-attr]
    with handle.bypass():
        return logits(model_)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def equal(found: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> bool:
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all linear": ({}, {}),
    "some, dropout": ({"target_modules": ["q_proj", "down_proj"], "dropout": 0.3}, {}),
    "head": ({"target_modules": ["v_proj", "lm_head"]}, {}),
    "head, tied": ({"target_modules": ["v_proj", "lm_head"]}, {"tie_word_embeddings": True}),
    "embedding, tied": ({"target_modules": ["v_proj", "embed_tokens"]}, {"tie_word_embeddings": True}),
    "whole head": ({"modules_to_save": ["lm_head"]}, {}),
    "whole head, tied": ({"modules_to_save": ["lm_head"]}, {"tie_word_embeddings": True}),
    "all linear, tied": ({}, {"tie_word_embeddings": True}),
    "whole embedding": ({"modules_to_save": ["embed_tokens"]}, {}),
}


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_export_computes_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from peft import PeftModel

    adapter, overrides = ADAPTERS[name]
    wanted = trained(tmp_path, monkeypatch, adapter, model_of(overrides=overrides))
    saved = tmp_path / "out" / "model"
    assert {"adapter_model.safetensors", "adapter_config.json", "config.json", "tokenizer.json"} <= {
        path.name for path in saved.iterdir()
    }
    assert not (saved / "model.safetensors").exists()

    base = build_model(ModelConfig(**model_of(overrides=overrides)), 0, byte_tokenizer())
    assert not equal(logits(base), wanted, 1e-3), "training has changed the model"
    assert equal(logits(PeftModel.from_pretrained(base, str(saved), autocast_adapter_dtype=False)), wanted)

    code, out, err = longspan("export", tmp_path / "out", "--out", tmp_path / "merged", "--merge")
    assert (code, out.splitlines()[-1]) == (0, f"model with its adapters merged: {tmp_path / 'merged'}"), err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="sdpa", dtype=torch.float64)
    assert equal(logits(merged), wanted)
    assert not any("lora" in key for key in merged.state_dict())
    parted = any(name in ("lm_head", "embed_tokens") for names in adapter.values() if names != 0.3 for name in names)
    assert merged.config.tie_word_embeddings == ("tie_word_embeddings" in overrides and not parted)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_packed_weights_are_merged_as_what_they_stood_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip({"int8": "torchao", "nf4": "bitsandbytes"}[kind])
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    model = model_of(overrides=wide, dtype="float32", quantization=kind)
    wanted = trained(tmp_path, monkeypatch, {}, model)
    plain = build_model(ModelConfig(**{**model, "quantization": "none"}), 0, byte_tokenizer())
    assert longspan("export", tmp_path / "out", "--out", tmp_path / "merged", "--merge")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="sdpa")
    assert equal(logits(merged), wanted, 2e-5)
    assert all(type(p) is nn.Parameter for p in merged.parameters())
    assert not equal(logits(plain), wanted, 1e-3)


def test_export_without_merging_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, monkeypatch, {}, model_of())
    code, out, _ = longspan("export", tmp_path / "out", "--out", tmp_path / "copy", "--json")
    assert code == 0 and json.loads(out) == {"out": str(tmp_path / "copy"), "what": "adapters"}
    saved = tmp_path / "out" / "model"
    assert all((tmp_path / "copy" / p.name).read_bytes() == p.read_bytes() for p in saved.iterdir())
    expect_error(longspan("export", saved, "--out", tmp_path / "copy"), 2, "--out", "is not empty")
    expect_error(longspan("export", tmp_path, "--out", tmp_path / "x"), 2, "neither a run's output folder")
    (saved / "longspan.json").unlink()
    expect_error(longspan("export", saved, "--out", tmp_path / "x", "--merge"), 2, "does not say which model")
    assert not (tmp_path / "x").exists()


def test_export_of_a_whole_model(tmp_path: Path) -> None:
    assert longspan("train", run_file(tmp_path, model=model_of()))[0] == 0
    expect_error(longspan("export", tmp_path / "out", "--out", tmp_path / "x", "--merge"), 2, "no adapters to merge")
    assert longspan("export", tmp_path / "out", "--out", tmp_path / "x")[0] == 0
    assert (tmp_path / "x" / "model.safetensors").is_file()


@pytest.mark.usefixtures("wide")
def test_adapters_of_a_saved_model_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base with weights of its own is found by its folder, also by PEFT alone."""
    from peft import AutoPeftModelForCausalLM

    build_model(ModelConfig(**model_of()), 5).save_pretrained(tmp_path / "base")
    model = {"name": str(tmp_path / "base"), "dtype": "float64"}
    wanted = trained(tmp_path, monkeypatch, {}, model)
    saved = tmp_path / "out" / "model"
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(saved), dtype=torch.float64).double()
    assert equal(logits(loaded), wanted)
    (saved / "longspan.json").unlink()
    again, _ = merged_model(saved)
    assert equal(logits(again.double()), wanted, 1e-5)  # read in the type that a model has by default


ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"type": "yarn", "factor": 4.0},
    "yarn, beta": {"type": "yarn", "factor": 2.5, "options": {"beta_fast": 16, "beta_slow": 2}},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "llama3": {"type": "llama3", "factor": 4.0, "options": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    "theta": {"theta": 5e5},
}


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", ROPES)
def test_positions_are_stretched_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A model of 32 positions, trained and read again on rows of up to 70 tokens."""
    window = 128 if name == "theta" else 32
    model = model_of(rope=ROPES[name], overrides={"max_position_embeddings": window})
    config = load_model_config(ModelConfig(**model))
    factor = ROPES[name].get("factor", 1)
    assert window_tokens(config) == int(window * factor)
    wanted = trained(tmp_path, monkeypatch, {}, model)
    assert longspan("export", tmp_path / "out", "--out", tmp_path / "merged", "--merge")[0] == 0
    written = json.loads((tmp_path / "merged" / "config.json").read_text())["rope_parameters"]
    assert written["rope_type"] == ROPES[name].get("type", "default")
    assert written["rope_theta"] == ROPES[name].get("theta", config.rope_parameters["rope_theta"])
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["rope_parameters"] == written
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="sdpa", dtype=torch.float64)
    assert equal(logits(merged), wanted)
    own = load_model_config(ModelConfig(**{**model, "rope": {}}))
    merged.config.rope_parameters = own.rope_parameters
    other = type(merged)(own).double()
    other.load_state_dict(merged.state_dict())
    assert not equal(logits(other), wanted, 1e-4), "the stretch matters"


def test_a_rope_that_does_not_fit_the_model(tmp_path: Path) -> None:
    def refused(rope: dict[str, Any], **changes: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load_model_config(ModelConfig(**{**model_of(rope=rope), **changes}))
        return str(caught.value)

    assert "Did you mean beta_fast?" in refused({"type": "yarn", "factor": 4, "options": {"beta_fas": 3}})
    assert "needs low_freq_factor and high_freq_factor" in refused({"type": "llama3", "factor": 4})
    assert "for each kind of layer" in refused({"type": "yarn", "factor": 4}, name="tiny-gemma3", overrides={})
    short = model_of(overrides={"max_position_embeddings": 32})
    said = longspan("train", run_file(tmp_path, model=short))
    expect_error(said, 2, "64 tokens, more than the 32 positions", "model.rope: {type: yarn, factor: 2}")
    check_fit(load_model_config(ModelConfig(**{**short, "rope": {"type": "yarn", "factor": 2.0}})), 64, 0)


def test_packed_weights_that_cannot_be_sharded(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    model = model_of(dtype="float32", quantization="int8")
    file = run_file(tmp_path, model=model, adapter={"kind": "lora"})
    expect_error(longspan("train", file, "--nproc", "2"), 2, "does not go with engine fsdp2", "engine: single")
    expect_error(longspan("train", file, "--engine", "ddp"), 2, "does not go with engine ddp", "engine: single")


def test_adapters_that_do_not_fit_the_model(tmp_path: Path) -> None:
    adapter = {"kind": "lora", "target_modules": ["q_prj"]}
    said = longspan("train", run_file(tmp_path, adapter=adapter))
    expect_error(said, 2, "adapter.target_modules: the model has no module 'q_prj'", "q_proj")
    said = longspan("train", run_file(tmp_path, adapter={"kind": "lora", "modules_to_save": ["score"]}))
    expect_error(said, 2, "adapter.modules_to_save: the model has no module 'score'", "lm_head")

"""`longspan.plan` refuses what `prepare` refuses, in its words, and arguments that are none; its signature is real."""

from __future__ import annotations

import inspect
from logging import ERROR
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.utils import logging

import longspan
from longspan.config import ModelConfig, RunConfig
from longspan.errors import ConfigError, ModelError
from longspan.integrations import planning
from longspan.integrations.presets import preset_config
from longspan.integrations.twinkle import SequenceParallelStrategy
from longspan.train.preflight import preflight
from test_refusals import SIZES, llama, mamba_sizes, model

MAMBA = hf.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
NO_HEADS = "config of mamba names no num_attention_heads"
SHARED = SIZES | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4}
GEMMA3N: dict[str, Any] = SHARED | {
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 32,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "intermediate_size": [24] * 4,
}
REFUSED: dict[str, tuple[hf.PreTrainedConfig, str]] = {
    "mixer-beside-attention": (
        hf.FalconH1Config(**SIZES, **mamba_sizes()),
        r"model.layers.0 \(FalconH1DecoderLayer\) mixes tokens outside its attention",
    ),
    "not-causal": (
        hf.BertConfig(**SIZES, is_decoder=False, attention_probs_dropout_prob=0.0),
        "BertSelfAttention of layer 0 is not causal",
    ),
    "dropout": (hf.BertConfig(**SIZES), "The config sets attention_probs_dropout_prob=0.1"),
    "unknown-mixer": (
        hf.Lfm2Config(**SIZES, layer_types=["full_attention", "conv"]),
        r"model.layers.1 \(Lfm2DecoderLayer\) never calls the attention interface",
    ),
    "shared-keys": (
        hf.Gemma3nTextConfig(**GEMMA3N),
        r"model.layers.2 \(Gemma3nTextDecoderLayer\) and all layers after it reuse the keys and values",
    ),
    "no-interface": (
        hf.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=4),
        "BloomModel does not call its attention through transformers' attention interface",
    ),
    "no-attention": (MAMBA, NO_HEADS),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_plan_refuses_what_prepare_refuses(kind: str) -> None:
    config, told = REFUSED[kind]
    with pytest.raises(ModelError, match=told):
        longspan.plan(config, 1024, 1)


def test_a_built_model_is_refused_by_its_configuration() -> None:
    made = model(hf.DiffLlamaConfig(**SIZES))
    with pytest.raises(ModelError, match=r"model.layers.0 \(DiffLlamaDecoderLayer\) calls attention 2 times"):
        longspan.plan(made, 1024, 1)
    with pytest.raises(ModelError, match="longspan plans transformers models, got Linear"):
        longspan.plan(torch.nn.Linear(2, 2), 1024, 1)


def test_a_family_that_cannot_be_narrow_is_planned() -> None:
    """GPT-NeoX rotates a share of heads whose width follows from hidden_size, so the narrow one cannot run."""
    assert longspan.plan(hf.GPTNeoXConfig(hidden_size=512, num_attention_heads=8), 1024, 1).seq_len == 1024


def test_random_numbers_are_as_they_were() -> None:
    before = torch.get_rng_state()
    longspan.plan("tiny-llama", 1024, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_transformers_is_quiet_while_a_copy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr(planning, "refuse_unless_exact", lambda small: levels.append(logging.get_verbosity()))
    before = logging.get_verbosity()
    longspan.plan("tiny-llama", 1024, 1)
    assert levels == [ERROR] and logging.get_verbosity() == before < ERROR


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"seq_len": 2.5}, "seq_len 2.5 is not a size: write a whole number, 128K"),
        ({"seq_len": True}, "seq_len True is not a size"),
        ({"seq_len": "long"}, "seq_len 'long' is not a size"),
        ({"world_size": "8"}, "world_size is a number of GPUs, such as 8, got '8'"),
        ({"world_size": True}, "world_size is a number of GPUs, such as 8, got True"),
        ({"gpu_memory_gib": "80GiB"}, "gpu_memory_gib is a number of GiB, such as 80, got '80GiB'"),
        ({"host_memory_gib": float("nan")}, "host_memory_gib is a number of GiB, such as 80, got nan"),
        ({"sequence_parallel_size": 2.0}, "sequence_parallel_size is a number of GPUs, such as 8, got 2.0"),
        ({"gpu": 3}, "gpu is a name, got 3"),
    ],
)
def test_arguments_that_are_none(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        longspan.plan("tiny-llama", **arguments)


def test_lengths_are_written_as_on_the_command_line() -> None:
    assert longspan.plan("tiny-llama", seq_len="4K", world_size=1).seq_len == 4096


def test_the_package_has_the_signature_of_its_function() -> None:
    found = inspect.signature(longspan.plan)
    assert found == inspect.signature(planning.plan)
    names = ("seq_len", "world_size", "gpu_memory_gib", "host_memory_gib", "engine")
    assert [found.parameters[name].default for name in names] == [None, 8, 139, 560, "fsdp2"]


def test_heads_that_a_config_does_not_name(tmp_path: Any) -> None:
    MAMBA.save_pretrained(tmp_path / "mamba")
    run = RunConfig(
        model=ModelConfig(name=str(tmp_path / "mamba"), init="random"),
        data={"files": ["none.txt"]},  # pyright: ignore[reportArgumentType]
        sequence_length=64,
        sequence_parallel_size=2,
        max_steps=1,
        output_dir=str(tmp_path / "run"),
    )
    with pytest.raises(ModelError, match=NO_HEADS):
        preflight(run, 2)
    with pytest.raises(ModelError, match=NO_HEADS):
        SequenceParallelStrategy(None, {"ulysses_size": 2}, model(MAMBA)).initialize()


def test_heads_of_each_layer() -> None:
    """Layers of one model may differ in their heads, and presets keep theirs."""
    for name in ("tiny-gemma4", "tiny-llama", "tiny-qwen3.5"):
        assert longspan.plan(preset_config(name), 1024, 1).seq_len == 1024
    assert longspan.plan(llama(), 1024, 1).seq_len == 1024

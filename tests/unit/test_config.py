"""Settings: sizes, defaults, and errors that name field, place, value and way out."""

from __future__ import annotations

import copy
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.config import RunConfig, load_config, parse_config, parse_size, settings
from longspan.config.section import parse_bytes
from longspan.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "model": {"name": "tiny-llama"},
    "data": {"files": "a.txt"},
    "sequence_length": "8K",
    "max_steps": 3,
    "output_dir": "out",
}

INSIDE: dict[str, Any] = {"optimizer": {"step_in_backward": True, "clip": "previous"}}


def minimal(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(MINIMAL), **changes}


def refusal(values: dict[str, Any], overrides: dict[tuple[str, ...], Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "tokens"), [(131072, 131072), ("131072", 131072), ("128K", 131072), ("8k", 8192), ("1M", 1048576)]
)
def test_sizes(text: Any, tokens: int) -> None:
    assert parse_size(text) == tokens


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-1K", "8KB", "1G", True, None, 1.5])
def test_sizes_that_are_not(text: Any) -> None:
    with pytest.raises(ValueError, match="128K"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "amount"),
    [(5, 5), ("5", 5), ("256GiB", 256 << 30), ("80g", 80 << 30), ("1.9TB", 1_900_000_000_000), (" 1.5 mib ", 3 << 19)],
)
def test_amounts_of_memory(text: Any, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1PB", "1 GiBs", "1e3GiB", "nan", True, None, 1.5])
def test_amounts_that_are_not(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"64GiB, 1.9TB or a number of bytes"):
        parse_bytes(text)


def test_defaults_and_frozen() -> None:
    config = parse_config(minimal())
    assert config.sequence_length == 8192
    assert config.data.files == ("a.txt",)
    assert config.engine == "auto"
    with pytest.raises(ValueError, match="frozen"):
        config.max_steps = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_round_trip_through_json() -> None:
    config = parse_config(minimal(optimizer={"betas": [0.8, 0.9]}, compute_dtype="bfloat16"))
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("key", "near"),
    [("sequence_lenght", "sequence_length"), ("lr", "optimizer.lr"), ("sequence_parallel", "sequence_parallel_size")],
)
def test_unknown_key_names_the_nearest(key: str, near: str) -> None:
    assert f"Did you mean {near}?" in refusal(minimal(**{key: 1}))


def test_unknown_key_in_a_section() -> None:
    message = refusal(minimal(optimizer={"learning": 1}))
    assert "optimizer.learning is not a setting" in message
    assert "weight_decay" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_steps": 0}, ["max_steps: 0", ">= 1", "Example"]),
        ({"max_steps": True}, ["max_steps: True", "a whole number"]),
        ({"max_steps": 1.5}, ["max_steps: 1.5", "a whole number"]),
        ({"engine": "zero"}, ["engine: 'zero'", "single | ddp | fsdp2"]),
        ({"optimizer": {"lr": -1}}, ["optimizer.lr: -1", "a number > 0"]),
        ({"optimizer": {"lr": float("nan")}}, ["optimizer.lr: nan", "a number > 0"]),
        ({"optimizer": {"betas": [0.9, 1.0]}}, ["optimizer.betas", "less than 1"]),
        ({"optimizer": 3}, ["optimizer must be a section"]),
        ({"data": {"files": []}}, ["data.files", "not empty"]),
        ({"sequence_length": "8Q"}, ["sequence_length: '8Q'", "128K"]),
        ({"sequence_parallel_size": 4, "ulysses_degree": 3}, ["ulysses_degree 3", "sequence_parallel_size 4"]),
        ({"sequence_parallel_size": 4, "ulysses_degree": 2, "ring_degree": 1}, ["2 x ring_degree 1"]),
        ({"memory": {"tile_tokens": "1K"}}, ["memory: tile_tokens has no effect with keep: auto"]),
        ({"engine": "ddp", "compute_dtype": "bfloat16"}, ["needs engine fsdp2"]),
        ({"optimizer": {"kind": "sgd"}}, ["optimizer.kind: 'sgd'", "adamw | adamw8bit | adamw-bf16-sr | adamw-host"]),
        ({"optimizer": {"kind": "adamw-bf16-sr"}}, ["model.dtype is float32", "set model.dtype to bfloat16"]),
        (
            {"optimizer": {"kind": "adamw8bit"}, "model": {"name": "tiny-llama", "dtype": "float64"}},
            ["model.dtype is float64", "choose adamw"],
        ),
        ({"optimizer": {"step_in_backward": True}}, ["max_grad_norm 1)", "clip: previous, or max_grad_norm: null"]),
        ({"optimizer": {"clip": "previous"}}, ["optimizer: clip: previous needs step_in_backward: true"]),
        (
            {"optimizer": {"clip": "previous", "step_in_backward": True, "max_grad_norm": None}},
            ["clip: previous needs step_in_backward: true and a max_grad_norm"],
        ),
        ({**INSIDE, "gradient_accumulation_steps": 3}, ["gradient_accumulation_steps 3", "set it to 1"]),
        ({**INSIDE, "engine": "ddp"}, ["for engine single with one process"]),
        ({**INSIDE, "compute_dtype": "bfloat16"}, ["no compute_dtype"]),
        ({**INSIDE, "sequence_parallel_size": 2}, ["sequence_parallel_size: 1"]),
        ({"adapter": {"rank": 4}}, ["adapter: rank is set, but kind is none", "kind: lora"]),
        ({"adapter": {"kind": "lora", "rank": 0}}, ["adapter.rank", ">= 1"]),
        ({"adapter": {"kind": "dora"}}, ["adapter.kind", "none | lora"]),
        ({"model": {"name": "x", "quantization": "nf4"}}, ["nf4 packs weights", "adapter.kind: lora"]),
        (
            {"model": {"name": "x", "quantization": "nf4"}, "adapter": {"kind": "lora"}, "compute_dtype": "bfloat16"},
            ["leave compute_dtype out", "model.dtype to bfloat16"],
        ),
        (
            {
                "model": {"name": "x", "dtype": "bfloat16"},
                "adapter": {"kind": "lora", "dtype": "float32"},
                "optimizer": {"kind": "adamw-bf16-sr"},
            },
            ["adapter.dtype is float32", "set adapter.dtype to bfloat16"],
        ),
        ({"model": {"name": "x", "rope": {"type": "yarm"}}}, ["model.rope.type", "yarn"]),
        ({"model": {"name": "x", "rope": {"type": "yarn"}}}, ["model.rope: type yarn needs a factor"]),
        ({"model": {"name": "x", "rope": {"type": "yarn", "factor": 1}}}, ["model.rope.factor", "> 1"]),
        ({"model": {"name": "x", "rope": {"factor": 4}}}, ["model.rope: factor needs a type"]),
        ({"schedule": {"warmup_steps": 9}}, ["warmup_steps 9 exceeds max_steps 3"]),
        ({"data": {"files": "${home}/x"}}, ["${home}", "${stdlib}"]),
    ],
)
def test_bad_values(changes: dict[str, Any], said: list[str]) -> None:
    message = refusal(minimal(**changes))
    assert all(part in message for part in said), message
    assert "pydantic" not in message


def test_stepping_in_backward_can_be_had() -> None:
    assert parse_config(minimal(**INSIDE, engine="single")).optimizer.clip == "previous"
    assert parse_config(minimal(optimizer={"step_in_backward": True, "max_grad_norm": None})).optimizer.clip == "exact"
    dtype = {"model": {"name": "tiny-llama", "dtype": "bfloat16"}}
    assert parse_config(minimal(optimizer={"kind": "adamw-bf16-sr"}, **dtype)).optimizer.kind == "adamw-bf16-sr"


def test_all_problems_at_once() -> None:
    message = refusal({"model": {"name": "x"}, "data": {"files": 3}, "engine": "x", "max_step": 1})
    assert message.startswith("6 settings cannot be used")
    assert len(message.splitlines()) == 7


def test_flag_overrides_and_is_named_in_errors() -> None:
    config = parse_config(minimal(), {("optimizer", "lr"): "1e-4", ("data", "files"): "[b, c]", ("output_dir",): "7"})
    assert config.optimizer.lr == 1e-4
    assert config.data.files == ("b", "c")
    assert config.output_dir == "7"
    assert "(--max-steps)" in refusal(minimal(), {("max_steps",): "none"})


def test_file_errors_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  name: tiny-llama\n  int: random\ndata: {files: a}\nmax_steps: 0\noutput_dir: o\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    message = str(caught.value)
    assert f"model.int ({file}:3) is not a setting. Did you mean model.init?" in message
    assert f"max_steps ({file}:5): 0" in message
    assert f"sequence_length ({file}) is missing" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", "a stands twice"),
        ("a: [1", "is not YAML"),
        ("", "must hold"),
        ("- 1\n", "must hold"),
        ("a: !!python/object:os.system x\n", "is not YAML"),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
    ],
)
def test_files_that_are_not_settings(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_stdlib_placeholder() -> None:
    config = parse_config(minimal(data={"files": ["${stdlib}/*.py"]}))
    assert config.data.files == (f"{sysconfig.get_path('stdlib')}/*.py",)


def test_every_setting_explains_itself() -> None:
    known = list(settings())
    assert len(known) > 30
    for setting in known:
        assert setting.description
        assert setting.description.endswith(".")
        assert setting.example is not None
        assert setting.allowed
        assert "default" in setting.help or "required" in setting.help


def test_examples_are_valid() -> None:
    for setting in settings():
        overrides: dict[tuple[str, ...], Any] = {setting.path: str(setting.example)}
        if setting.path[-1] in ("ulysses_degree", "ring_degree"):
            overrides[("sequence_parallel_size",)] = 4
        if setting.path[0] == "memory" and setting.path[-1] != "keep":
            overrides = {("memory", "keep"): "x,none", ("memory", "tile_tokens"): "1K", **overrides}
            overrides |= {} if ("memory", "gpu_bytes") in overrides else {("memory", "gpu_bytes"): 0}
        if setting.path[-1] == "warmup_steps":
            overrides[("max_steps",)] = 100
        if setting.path[-1] == "clip":
            overrides[("optimizer", "step_in_backward")] = True
        if setting.path[-1] == "step_in_backward":
            overrides[("optimizer", "clip")] = "previous"
        if setting.path[-1] in ("subset", "streaming"):
            overrides[("data", "format")] = "dataset"
        if setting.path[-1] == "form":
            overrides[("data", "format")] = "jsonl"
        if setting.path[0] == "adapter" or setting.path[-1] == "quantization":
            overrides = {("adapter", "kind"): "lora", **overrides}
        if setting.path[:2] == ("model", "rope") and setting.path[-1] != "theta":
            overrides = {("model", "rope", "type"): "yarn", ("model", "rope", "factor"): 4.0, **overrides}
        assert parse_config(minimal(), overrides)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from([setting.path for setting in settings()] + [("model",), ("data",), ("optimizer",)]),
)
def test_any_value_is_taken_or_refused_in_words(value: Any, path: tuple[str, ...]) -> None:
    values = minimal()
    inner = values
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = value
    try:
        assert isinstance(parse_config(values), RunConfig)
    except ConfigError as error:
        assert path[0] in str(error) or "${" in str(error)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"engine": "zero-1", "optimizer": {"kind": "adamw-host"}},
            "optimizer.kind adamw-host does not serve engine zero-1",
        ),
        ({"engine": "zero-0", "compute_dtype": "bfloat16"}, "compute_dtype bfloat16 needs engine zero-1 to zero-3"),
        ({"engine": "zero-3", "optimizer": {"step_in_backward": True, "clip": "previous"}}, "is for engine single"),
        (
            {"engine": "zero-2", "adapter": {"kind": "lora", "dtype": "bfloat16"}},
            "adapter.dtype is bfloat16 and model.dtype float32.*leave adapter.dtype out",
        ),
    ],
)
def test_what_deepspeed_cannot_do(settings: dict[str, Any], message: str) -> None:
    base = {
        "model": {"name": "tiny-llama"},
        "data": {"files": "a"},
        "sequence_length": 64,
        "max_steps": 1,
        "output_dir": "out",
    }
    with pytest.raises(ConfigError, match=message):
        parse_config({**base, **settings})

"""What `longspan plan` prints: tables, several lengths, adapters, and the YAML of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from longspan.cli.launch import start
from longspan.config import load_config, parse_config
from longspan.integrations.planning import cluster_for, task_for
from longspan.integrations.presets import preset_config
from longspan.integrations.shapes import model_shape
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB
from longspan.report.words import short
from longspan.train.preflight import preflight
from test_plan_public import run

LLAMA = ("--model", "llama-8b", "--gpus", "2xH200", "--host-memory", "256GiB")


def test_one_length_by_cause() -> None:
    code, out, err = run(*LLAMA, "--seq-len", "128K")
    assert (code, err) == (0, "")
    lines = {line.rsplit("  ", 3)[0].strip(): line.split() for line in out.splitlines()}
    made = json.loads(run(*LLAMA, "--seq-len", "128K", "--json")[1])
    for cause, size in made["gpu_bytes"].items():
        assert f"{size / GIB:.1f}" in next(line for line in out.splitlines() if line.startswith(f"{cause} "))
    assert short(made["seconds"]["attention"]) in out
    assert lines and f"{made['tokens_per_s']:,.0f} tokens/s" in out
    total = next(line for line in out.splitlines() if line.startswith("in all"))
    assert total.split()[2] == f"{sum(made['gpu_bytes'].values()) / GIB:.1f}"
    assert total.split()[-1] == short(made["step_s"])


def test_several_lengths() -> None:
    code, out, err = run(*LLAMA, "--seq-len", "32K,128K,1M")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line[:9].strip()[:1].isdigit()]  # others go on with one
    assert [row[0] for row in rows] == ["32,768", "131,072", "1,048,576"]
    made = json.loads(run(*LLAMA, "--seq-len", "32K,128K,1M", "--json")[1])
    assert [plan["seq_len"] for plan in made] == [32768, 131072, 1048576]
    assert [row[1] for row in rows] == [short(plan["step_s"]) for plan in made]


def test_gpus_on_a_row() -> None:
    """Two GPUs take two rows of 8K faster than one row together."""
    both, one = (json.loads(run(*LLAMA, "--seq-len", "8K", "--json", *more)[1]) for more in ((), ("--sp", "2")))
    assert [made["degrees"]["data_parallel"] for made in (both, one)] == [2, 1]
    assert run(*LLAMA, "--sp", "2", "--calibrate")[0] == 2


def test_the_longest() -> None:
    asked = json.loads(run(*LLAMA, "--max-seq", "--json")[1])
    assert asked == json.loads(run(*LLAMA, "--json")[1])
    assert asked["seq_len"] == asked["max_seq_len"] > 2 << 20


def test_adapters_need_less() -> None:
    """Frozen weights have neither gradients nor optimizer states; the sizes are those of PEFT's own modules."""
    full = json.loads(run(*LLAMA, "--seq-len", "128K", "--json")[1])
    lora = json.loads(run(*LLAMA, "--seq-len", "128K", "--lora-rank", "16", "--json")[1])
    config = preset_config("llama-8b")
    h, i, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    trained = config.num_hidden_layers * 16 * (2 * (h + h) + 2 * (h + kv) + 3 * (h + i))
    assert lora["gpu_bytes"]["optimizer"] == pytest.approx(trained * 4 / 2, rel=1e-6)  # two moments in bf16, two ranks
    assert "gradients" not in lora["gpu_bytes"] or lora["gpu_bytes"]["gradients"] < GIB
    assert lora["max_seq_len"] > full["max_seq_len"]
    assert lora["step_s"] < full["step_s"]
    some = json.loads(run(*LLAMA, "--seq-len", "128K", "--lora-rank", "16", "--lora-targets", "q_proj", "--json")[1])
    assert some["gpu_bytes"]["optimizer"] == pytest.approx(config.num_hidden_layers * 16 * (h + h) * 4 / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (LLAMA, {"engine": "fsdp2", "compute_dtype": "bfloat16", "optimizer.kind": "adamw", "model.dtype": "float32"}),
        (
            ("--model", "llama-8b", "--gpus", "H200", "--host-memory", "256GiB"),
            {
                "engine": "single",
                "optimizer.kind": "adamw-host",
                "optimizer.step_in_backward": True,
                "model.dtype": "bfloat16",
            },
        ),
        ((*LLAMA, "--lora-rank", "8"), {"adapter.rank": 8, "model.dtype": "bfloat16", "compute_dtype": None}),
        (
            (*LLAMA, "--optimizer", "adamw-bf16-sr"),
            {"engine": "fsdp2", "compute_dtype": None, "model.dtype": "bfloat16"},
        ),
        ((*LLAMA, "--engine", "zero-3"), {"engine": "zero-3", "compute_dtype": "bfloat16", "model.dtype": "float32"}),
        (("--model", "tiny-llama", "--gpus", "2xcpu"), {"compute_dtype": None, "model.dtype": "float32"}),
    ],
)
def test_yaml_is_a_run(tmp_path: Path, flags: tuple[str, ...], expected: dict[str, Any]) -> None:
    code, out, err = run(*flags, "--seq-len", "64K", "--yaml")
    assert (code, err) == (0, "")
    (tmp_path / "run.yaml").write_text(out)
    config: Any = load_config(tmp_path / "run.yaml")
    assert config == parse_config(yaml.safe_load(out))
    assert config.sequence_length == 65536
    assert config.sequence_parallel_size == (1 if "H200" in flags else 2)
    for name, value in expected.items():
        found = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name


def test_a_planned_run_trains(tmp_path: Path) -> None:

    code, out, _ = run("--model", "tiny-llama", "--gpus", "cpu", "--seq-len", "256", "--engine", "single", "--yaml")
    assert code == 0
    (tmp_path / "run.yaml").write_text(out)
    (tmp_path / "some.py").write_text("print('some source')\n" * 30)
    over = {("data", "files"): [str(tmp_path / "some.py")], ("max_steps",): 2, ("output_dir",): str(tmp_path / "out")}
    with (tmp_path / "log").open("w") as log:
        assert start(load_config(tmp_path / "run.yaml", over), 1, log) == 2
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*LLAMA, "--max-seq", "--seq-len", "32K"), "--max-seq looks for the longest rows"),
        ((*LLAMA, "--seq-len", "32K,64K", "--yaml"), "names 2: take one"),
        ((*LLAMA, "--yaml", "--json"), "--yaml and --json"),
        ((*LLAMA, "--seq-len", "32K,"), "--seq-len '' is not a size"),
        ((*LLAMA, "--lora-targets", "q_proj"), "--lora-rank"),
        ((*LLAMA, "--lora-rank", "8", "--lora-targets", "nothing"), "has no module 'nothing'"),
        (("--model", "llama-1b", "--gpus", "2xH200", "--engine", "ddp", "--seq-len", "8K", "--yaml"), "fsdp2"),
    ],
)
def test_errors(flags: tuple[str, ...], said: str) -> None:
    code, out, err = run(*flags)
    assert (code, out) == (2, "")
    assert said in err and err.count("Error: ") == 1 and "Traceback" not in err


def test_yaml_for_rows_beyond_the_positions(tmp_path: Path) -> None:
    """What is said to train is checked as a run is, data included; models with weights are not stretched in silence."""
    code, out, _ = run("--model", "tiny-llama", "--gpus", "cpu", "--seq-len", "192K", "--engine", "single", "--yaml")
    assert code == 0
    text = tmp_path / "long.txt"
    text.write_text("x" * 140_000)
    (tmp_path / "run.yaml").write_text(out)
    over = {("data", "files"): [str(text)], ("output_dir",): str(tmp_path / "out")}
    corpus, _ = preflight(load_config(tmp_path / "run.yaml", over), 1)
    assert max(corpus.lengths_tokens) >= 140_000
    preset_config("tiny-llama", max_position_embeddings=8192).save_pretrained(tmp_path / "model")
    flags = ("--model", str(tmp_path / "model"), "--gpus", "cpu", "--seq-len", "32K", "--engine", "single", "--yaml")
    code, out, err = run(*flags)
    assert (code, out) == (2, "") and "fewer than rows of 32,768 tokens" in err and "model.rope" in err


def test_shards_that_are_shorter_than_a_tile() -> None:
    """Many short rows leave a rank fewer tokens of each than the smallest tile has."""
    task = task_for(model_shape("tiny-llama"), cluster_for(find_machine("h200"), 2, 8, 100 * GIB, 0), "fsdp2", "adamw")
    for tokens in (512, 1024, 2048):
        choice = replace(task, rows=16).choose(tokens)
        assert choice is not None and choice.step_s > 0

"""Rows of metrics.jsonl, the count of a model's work, the line that a user sees, the learning rate."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3MoeConfig

from longspan.config import RunConfig, parse_config
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import random_model
from longspan.integrations.shapes import expert_counts, model_shape
from longspan.mesh import Mesh
from longspan.train.metrics import MetricsFile, Row, Work, model_work, peak_bytes, peak_flops
from longspan.train.progress import Progress, describe, duration
from longspan.train.schedule import learning_rate

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
}


def row(step: int = 1, **changes: float | None) -> Row:
    values = {"loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100, "tokens_per_s": 50.0, "mfu": None}
    values |= {"peak_gpu_bytes": 0, "peak_host_bytes": 2**30, "step_s": 2.0, **changes}
    return Row(step=step, **values)  # pyright: ignore[reportArgumentType]


def test_rows_that_cannot_be_read_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"st\n\0\0\0\0\n\xff\xfe\n[1]\n{}\n{"step": "2"}\n{"step": 2}\n{"step": 3}\n{"step": 4'
    )
    MetricsFile(path).go_on(2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert f"{path}: 7 lines that cannot be read are dropped" in capsys.readouterr().err


def test_a_row_per_step(tmp_path: Path) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    file = MetricsFile(path)
    assert not path.parent.exists()
    for step in (1, 2):
        file.write(row(step))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2]
    fields = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "peak_gpu_bytes", "peak_host_bytes"]
    assert list(rows[0]) == [*fields, "step_s"]
    assert rows[0]["mfu"] is None
    MetricsFile(path).write(row(7))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [7]


def test_a_number_that_json_lacks_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        MetricsFile(tmp_path / "m").write(row(loss=math.nan))
    assert not (tmp_path / "m").exists() or not (tmp_path / "m").read_text()


def test_a_skipped_step_says_so(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "m").write(row(loss=math.nan, skipped=True))
    found = json.loads((tmp_path / "m").read_text())
    assert found["loss"] is None and found["skipped"] is True and found["grad_norm"] == row().grad_norm
    stream = io.StringIO()
    progress = Progress(stream, max_steps=9, every=5)
    progress.step(row(2, loss=math.nan, skipped=True))
    progress.step(row(3, loss=math.inf, skipped=True))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 2 is skipped: loss nan") and lines[1].endswith("(2 skipped)")


def build(config: PretrainedConfig) -> Work | None:
    return model_work(AutoModelForCausalLM.from_config(config), config)


@pytest.mark.parametrize("tied", [False, True])
def test_work_of_a_dense_model(tied: bool) -> None:
    work = build(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    layer = 32 * 64 * 2 + 32 * 32 * 2 + 3 * 32 * 48
    assert work == Work(parameters=2 * layer + 32 * 50, attention_width=2 * 4 * 32)
    assert work is not None
    assert work.flops([10, 20]) == 6 * work.parameters * 30 + 3 * work.attention_width * (100 + 400)


def test_work_counts_chosen_experts_only() -> None:
    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    }
    work = build(Qwen3MoeConfig(**SMALL, **experts, mlp_only_layers=[], tie_word_embeddings=False))
    assert work is not None
    layer = 32 * 64 * 2 + 32 * 32 * 2 + 32 * 8 + 2 * 3 * 32 * 16
    assert work.parameters == 2 * layer + 32 * 50


def test_work_of_windowed_attention_counts_what_is_seen() -> None:
    config = MistralConfig(**SMALL, sliding_window=4)
    work, plain = build(config), build(MistralConfig(**SMALL, sliding_window=None))
    assert work is not None
    assert plain is not None
    assert (work.attention_width, work.windows) == (0, ((4, plain.attention_width),))
    assert work.flops([4, 3, 1]) == plain.flops([4, 3, 1])
    attention = 6 * plain.attention_width
    assert work.flops([10]) - 60 * work.parameters == attention * (4 * 10 - 4 * 4 / 2)
    assert work.flops([10, 2]) - 72 * work.parameters == attention * (32 + 2)


def test_work_of_layers_with_heads_of_their_own() -> None:
    """Gemma 4: 4 heads of 16 see a window of 24 tokens in one layer, 4 heads of 32 see everything in the other."""
    config = preset_config("tiny-gemma4")
    work = model_work(random_model(config, torch.float32, torch.device("cpu")), config.get_text_config())
    assert work is not None
    assert (work.attention_width, work.windows) == (4 * 2 * 32, ((24, 4 * 2 * 16),))


@pytest.mark.parametrize("name", ["tiny-deepseek-v3", "tiny-gemma4", "tiny-mixtral"])
def test_plans_and_metrics_count_the_same_experts(name: str) -> None:
    model = random_model(preset_config(name), torch.float32, torch.device("cpu"))
    work = model_work(model, model.config)
    assert work is not None
    assert work.parameters == model_shape(name).active
    assert expert_counts(model.config) == {"tiny-deepseek-v3": (8, 2)}.get(name, (4, 2))


@pytest.mark.parametrize("name", ["tiny-qwen3-vl", "tiny-qwen2.5-vl"])
def test_text_tokens_are_not_multiplied_with_a_vision_tower(name: str) -> None:
    model = random_model(preset_config(name), torch.float32, torch.device("cpu"))
    work = model_work(model, model.config.get_text_config())
    assert work is not None
    assert work.parameters == model_shape(name).active


def test_work_of_other_kinds_of_layers_is_not_guessed() -> None:
    config = LlamaConfig(**SMALL)
    config.layer_types = ["full_attention", "chunked_attention"]
    assert build(config) is None


def test_on_a_cpu_there_is_no_peak_and_no_gpu_memory() -> None:
    cpu = torch.device("cpu")
    assert peak_flops(cpu) is None
    gpu_bytes, host_bytes, stops = peak_bytes(cpu, Mesh(), False)
    assert not stops and peak_bytes(cpu, Mesh(), False, True)[2:] == (0, 1)
    assert gpu_bytes == 0
    assert host_bytes > 50 * 2**20


def test_the_line_of_a_step() -> None:
    line = describe(row(2), max_steps=10, elapsed_s=4.0)
    assert line.startswith("step  2/10  loss 2.5000")
    assert "50 tokens/s" in line
    assert "MFU" not in line
    assert "GPU" not in line
    assert line.endswith("left 16s")
    assert "MFU 41.2%" in describe(row(1, mfu=0.412), 10, 1.0)
    assert [duration(s) for s in (42, 187, 7500)] == ["42s", "3m07s", "2h05m"]


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Progress(stream, max_steps=7, every=3) as progress:
        progress.note("hello [world]")
        for step in range(1, 8):
            progress.step(row(step))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "hello [world]"
    assert [line.split("/")[0] for line in lines[1:]] == ["step 1", "step 3", "step 6", "step 7"]


def test_a_live_line_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress(stream, max_steps=2) as progress:
        progress.note("hello")
        progress.step(row(1))
        progress.step(row(2))
    assert "hello" in stream.getvalue()
    assert "step 2/2" in stream.getvalue()


def schedule(**options: object) -> RunConfig:
    values = {"model": {"name": "x"}, "data": {"files": "x"}, "sequence_length": 8, "output_dir": "x", "max_steps": 10}
    return parse_config({**values, "optimizer": {"lr": 2.0}, "schedule": options})


def test_learning_rate() -> None:
    assert [learning_rate(s, schedule()) for s in (1, 10)] == [2.0, 2.0]
    cosine = schedule(kind="cosine", warmup_steps=4, final_ratio=0.1)
    assert [learning_rate(s, cosine) for s in (1, 2, 4)] == [0.5, 1.0, 2.0]
    assert learning_rate(7, cosine) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(10, cosine) == pytest.approx(0.2)
    falling = [learning_rate(s, cosine) for s in range(4, 11)]
    assert falling == sorted(falling, reverse=True)

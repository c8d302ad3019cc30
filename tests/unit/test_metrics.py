"""Rows of metrics.jsonl, the count of a model's work, the line that a user sees, the learning rate."""

from __future__ import annotations

import io
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3MoeConfig

from longspan.config import RunConfig, parse_config
from longspan.errors import ConfigError
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import random_model
from longspan.integrations.shapes import expert_counts, model_shape
from longspan.mesh import Mesh
from longspan.train import meter as meter_module
from longspan.train import trainee as trainee_module
from longspan.train.meter import Meter
from longspan.train.metrics import PHASES, Memory, MetricsFile, Row, Work, largest_memory, model_work, peak_flops
from longspan.train.packing import Step
from longspan.train.progress import Progress, describe, sparkline
from longspan.train.schedule import learning_rate
from longspan.train.trainee import assemble

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
    values |= {"mfu_full": None, "peak_gpu_bytes": 0, "peak_host_bytes": 2**30, "gpu_bytes": 0, "host_bytes": 2**29}
    values |= {"step_s": 2.0, "data_s": 0.1, "forward_s": 0.5, "backward_s": 1.0, "reduce_s": 0.2}
    values |= {"optimizer_s": 0.1, "other_s": 0.1, "exchange_s": 0.0, **changes}
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
    fields = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "mfu_full"]
    fields += ["peak_gpu_bytes", "peak_host_bytes", "gpu_bytes", "host_bytes", "step_s"]
    assert list(rows[0]) == [*fields, *(f"{phase}_s" for phase in PHASES), "exchange_s"]
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
    now, peak, flags = largest_memory(cpu, Mesh(), True, False)
    assert flags == (True, False) and largest_memory(cpu, Mesh())[2] == ()
    assert now.gpu_bytes == peak.gpu_bytes == 0
    assert peak.host_bytes >= now.host_bytes > 50 * 2**20
    assert Memory(1, 4).or_larger(Memory(2, 3)) == Memory(2, 4)


def test_the_line_of_a_step() -> None:
    line = describe(row(2), max_steps=10, left_s=16.0)
    assert line.startswith("step  2/10  loss 2.5000")
    assert "50 tokens/s" in line
    assert "MFU" not in line
    assert "GPU" not in line
    assert line.endswith("left 16s")
    assert "communication" not in line
    assert "MFU 41.2%  communication 25.0%" in describe(row(1, mfu=0.412, exchange_s=0.5), 10, 1.0)


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with Progress(stream, max_steps=7, every=3) as progress:
        progress.note("hello [world]")
        for step in range(1, 8):
            progress.step(row(step))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "hello [world]"
    assert [line.split("/")[0] for line in lines[1:]] == ["step 1", "step 3", "step 6", "step 7"]


def test_a_panel_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress(stream, max_steps=4) as progress:
        progress.note("hello [world]")
        progress.step(row(1, loss=3.0))
        gpu = {"mfu": 0.412, "mfu_full": 0.53, "peak_gpu_bytes": 3 * 2**30}
        progress.step(row(2, loss=2.0, exchange_s=0.5, **gpu))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "hello [world]" in plain
    last = plain[plain.rindex("step 2/4") :]
    for part in (
        "left 4s",
        "2.0000 █▁",
        "50",
        "41.2% (53.0% full)",
        "3.0 GiB",
        "25.0%",
        "0.50 / 1.00 s",
        "1.00e-03",
    ):
        assert part in last, part
    assert "–" in plain[: plain.rindex("step 2/4")]  # no GPU in the first step


def test_a_sparkline() -> None:
    assert sparkline([1.0]) == sparkline([2.0]) == "▁"
    assert sparkline([0.0, 7.0, 3.0]) == "▁█▄"


def test_work_without_masks() -> None:
    work = Work(parameters=10, attention_width=8, frozen=2, windows=((4, 3),))
    assert work.flops([10, 2], masked=False) == 56 * 12 + 6 * (8 + 3) * (100 + 4)


def test_a_step_is_measured_from_its_data_to_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases add up to the step, whose data is part of it; memory's peak stays when a later step needs less."""
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    def source() -> Iterator[Step]:
        for _ in range(2):
            wait(3.0)
            yield Step([], 1, 100, [60, 40])

    memory = iter([(Memory(5, 6), Memory(5, 9), (False,)), (Memory(4, 7), Memory(4, 9), (True,))])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(meter_module, "largest_memory", lambda *rest, **more: next(memory))
    monkeypatch.setattr(meter_module, "peak_flops", lambda device: 1e3)
    work = Work(parameters=10, attention_width=8)
    meter, rows = Meter(torch.device("cpu"), Mesh(), work), []
    for number, step in enumerate(meter.steps(source()), 1):
        for name, seconds in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("forward", 2.0), ("optimizer", 1.5)):
            with meter.phase(name):  # pyright: ignore[reportArgumentType]
                wait(seconds)
        wait(0.5)
        rows.append(meter.row(number, step, False, loss=2.0, grad_norm=1.0, lr=0.1))
        wait(50.0)  # a checkpoint is no part of a step
    (first, flags), (second, flags_then) = rows
    assert (flags, flags_then) == ((False,), (True,))
    assert [getattr(first, f"{phase}_s") for phase in PHASES] == [4.0, 4.0, 4.0, 0.0, 1.5, 0.5]
    assert (first.step_s, second.step_s, first.tokens_per_s) == (14.0, 14.0, 100 / 14.0)
    assert (second.gpu_bytes, second.peak_gpu_bytes, second.host_bytes, second.peak_host_bytes) == (4, 5, 7, 9)
    assert first.mfu == work.flops([60, 40]) / 14e3 and first.mfu_full == work.flops([60, 40], masked=False) / 14e3
    assert first.exchange_s == first.exchange_share == 0.0


@pytest.mark.parametrize("used", [False, True])
def test_peaks_before_a_run_are_not_its_own(monkeypatch: pytest.MonkeyPatch, used: bool) -> None:
    """GPU memory of a notebook's earlier cells, say; the record begins anew before anything is built."""
    gpu, done = torch.device("cuda", 0), []

    def build_engine(*rest: object) -> None:
        done.append("building")
        raise ConfigError("enough")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", done.append)
    monkeypatch.setattr(trainee_module, "build_engine", build_engine)
    with pytest.raises(ConfigError, match="enough"):
        assemble(schedule(), lambda blank: nn.Linear(1, 1), gpu)
    assert done == [*[gpu] * used, "building"]


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

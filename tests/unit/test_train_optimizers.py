"""`longspan train` with each optimizer: the same curve, the same model, and refusals before anything is started."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from longspan.cli import allocator, main

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
INSIDE = ("--optimizer-step-in-backward", "--optimizer-max-grad-norm", "null")
TILES = ("--memory-keep", "x+O", "--memory-tile-tokens", "16")
PREVIOUS = ("--optimizer-step-in-backward", "--optimizer-clip", "previous", "--optimizer-max-grad-norm", "0.5")


@pytest.fixture
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def run_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("def double(x):\n    return 2 * x\n" * 20)
    overrides = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 257}
    values: dict[str, Any] = {
        "model": {"name": "tiny-llama", "init": "random", "overrides": overrides},
        "data": {"files": str(folder / "a.txt"), "long_documents": "split"},
        "sequence_length": 64,
        "max_steps": 5,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "output_dir": str(folder / "out"),
        "logging": {"to": []},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**values, **changes}))
    return file


def longspan(*arguments: str | Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def trained(folder: Path, *arguments: str, **changes: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    code, _, err = longspan("train", run_file(folder, **changes), "--nproc", "1", *arguments)
    assert code == 0, err
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return rows, load_file(folder / "out" / "model" / "model.safetensors")


def figures(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), ("--optimizer-kind", "adamw-host")),
        (("--optimizer-max-grad-norm", "null"), INSIDE),
        (("--optimizer-max-grad-norm", "null"), ("--optimizer-kind", "adamw-host", *INSIDE)),
        ((*TILES, "--optimizer-max-grad-norm", "null"), (*TILES, *INSIDE)),
        (PREVIOUS, ("--optimizer-kind", "adamw-host", *PREVIOUS)),
        pytest.param(
            ("--optimizer-kind", "adamw8bit", "--optimizer-max-grad-norm", "null"),
            ("--optimizer-kind", "adamw8bit", *INSIDE),
            marks=needs_torchao,
        ),
    ],
)
@pytest.mark.usefixtures("eager")
def test_the_same_curve(tmp_path: Path, one: tuple[str, ...], other: tuple[str, ...]) -> None:
    expected, weights = trained(tmp_path / "one", *one)
    found, theirs = trained(tmp_path / "other", *other)
    for name in ("loss", "grad_norm", "lr"):
        assert figures(found, name) == pytest.approx(figures(expected, name), rel=1e-6, abs=1e-6), name
    assert figures(found, "loss")[-1] < figures(found, "loss")[0] - 0.1
    for name, value in weights.items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-5, atol=1e-6)


@needs_torchao
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["adamw8bit", "adamw-bf16-sr", "adamw-host"])
def test_bfloat16_models_learn(tmp_path: Path, kind: str) -> None:
    rows, weights = trained(tmp_path, "--optimizer-kind", kind, "--model-dtype", "bfloat16")
    assert figures(rows, "loss")[-1] < figures(rows, "loss")[0] - 0.1
    assert all(value.dtype == torch.bfloat16 for value in weights.values())


def test_clipping_by_the_previous_norm_differs_from_none(tmp_path: Path) -> None:
    clipped, free = trained(tmp_path / "a", *PREVIOUS)[0], trained(tmp_path / "b", *INSIDE)[0]
    assert figures(clipped, "grad_norm")[:2] == pytest.approx(figures(free, "grad_norm")[:2], rel=1e-6)
    assert min(figures(free, "grad_norm")) > 0.5
    assert figures(clipped, "loss")[-1] != pytest.approx(figures(free, "loss")[-1], rel=1e-6)


def test_a_step_that_is_not_finite_stops_the_run_though_it_was_applied(tmp_path: Path) -> None:
    code, _, err = longspan("train", run_file(tmp_path), "--nproc", "1", "--optimizer-lr", "1e30", *INSIDE)
    assert code == 1
    assert "Step 2: loss" in err and "was applied all the same; no model" in err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "run.json", "report.html"}
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 1


def test_several_processes_are_refused_before_they_start(tmp_path: Path) -> None:
    code, _, err = longspan("train", run_file(tmp_path), "--nproc", "2", *INSIDE)
    assert code == 2
    assert "step_in_backward serves one process, not 2" in err and "--nproc 1" in err
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out, err = longspan("train", run_file(tmp_path), "--nproc", "1", "--optimizer-kind", "adamw8bit")
    assert code == 2 and not out, "before the data are read"
    assert "pip install 'torchao" in err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def allocators(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_training_lets_gpu_memory_grow_in_place(tmp_path: Path, allocators: pytest.MonkeyPatch) -> None:
    assert re.search(r"allocator +default; `longspan train` sets expandable_segments:True", longspan("doctor")[1])
    longspan("train", run_file(tmp_path), "--nproc", "1", "--max-steps", "0")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert re.search(r"allocator +PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n", longspan("doctor")[1])


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_users_allocator_setting_stays(allocators: pytest.MonkeyPatch, name: str) -> None:
    allocators.setenv(name, "max_split_size_mb:64")
    allocator.choose_allocator()
    assert os.environ[name] == "max_split_size_mb:64"
    assert sum(variable in os.environ for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")) == 1
    assert json.loads(longspan("doctor", "--json")[1])["allocator"] == f"{name}=max_split_size_mb:64"
    assert "leaves as it is; without expandable_segments:True" in longspan("doctor")[1]


def test_doctor_tells_which_optimizers_can_run() -> None:
    facts = json.loads(longspan("doctor", "--json")[1])
    assert facts["optimizers"]["adamw"] is None and facts["optimizers"]["adamw-host"] is None
    installed = importlib.util.find_spec("torchao") is not None
    assert (facts["optimizers"]["adamw8bit"] is None) == installed
    assert (facts["versions"]["torchao"] is not None) == installed

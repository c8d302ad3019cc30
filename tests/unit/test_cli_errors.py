"""What a user sees when something is wrong: one message, an exit code, no traceback, nothing written."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file

from longspan.cli import launch, main

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def run_file(folder: Path, **changes: Any) -> Path:
    (folder / "a.txt").write_text("def double(x):\n    return 2 * x\n" * 4)
    values: dict[str, Any] = {
        "model": {
            "name": "tiny-llama",
            "init": "random",
            "overrides": {**TINY, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 257},
        },
        "data": {"files": str(folder / "a.txt"), "long_documents": "split"},
        "sequence_length": 64,
        "max_steps": 2,
        "output_dir": str(folder / "out"),
        "logging": {"to": []},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**values, **changes}))
    return file


def longspan(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the command line here; return exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def started(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the command line as a user does, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "longspan", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


def expect_error(result: tuple[int, str, str], code: int, *said: str) -> None:
    output = result[1] + result[2]
    assert result[0] == code, output
    assert "Traceback" not in output, output
    assert output.count("Error: ") == 1, output
    message = output[output.index("Error: ") :]
    assert all(part in message for part in said), message


def check_nothing_written(folder: Path) -> None:
    assert not (folder / "out").exists()


def test_unknown_key(tmp_path: Path) -> None:
    done = longspan("train", run_file(tmp_path, sequence_lenght=64))
    expect_error(done, 2, "sequence_lenght", "run.yaml:", "Did you mean sequence_length?")
    check_nothing_written(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    expect_error(longspan("train", tmp_path / "none.yaml"), 2, "No such file")
    done = longspan("train", run_file(tmp_path), "--data-files", tmp_path / "none*.txt")
    expect_error(done, 2, "data.files", "matches no file")
    check_nothing_written(tmp_path)


def test_empty_document(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    done = longspan("train", run_file(tmp_path), "--data-files", tmp_path / "*.txt")
    expect_error(done, 2, "empty.txt: the document is empty", "empty_documents")
    check_nothing_written(tmp_path)


def test_processes_that_cannot_be_divided(tmp_path: Path) -> None:
    done = longspan("train", run_file(tmp_path), "--sequence-parallel-size", "3", "--nproc", "4")
    expect_error(done, 2, "sequence_parallel_size 3 does not divide the 4 processes", "--nproc 3")
    check_nothing_written(tmp_path)


def test_heads_that_cannot_serve_the_degree(tmp_path: Path) -> None:
    arguments = ("--sequence-parallel-size", "4", "--ulysses-degree", "4")
    expect_error(longspan("train", run_file(tmp_path), *arguments), 2, "ulysses_degree 4", "2")
    check_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--model-name", "tiny-lama", "Did you mean the preset tiny-llama?"),
        ("--model-init", "pretrained", "is a preset, which has no weights"),
        ("--model-overrides", "{hiden_size: 8}", "Did you mean hidden_size?"),
        ("--model-overrides", "{vocab_size: 64}", "the model's vocabulary ends at 63"),
        ("--model-overrides", "{max_position_embeddings: 32}", "max_position_embeddings"),
        ("--data-tokenizer", "./none", "data.tokenizer: cannot load"),
        ("--output-dir", "run.yaml", "is a file"),
        ("--optimizer-lr", "fast", "optimizer.lr (--optimizer-lr): 'fast'"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, flag: str, value: str, said: str) -> None:
    if flag == "--output-dir":
        value = str(tmp_path / value)
    expect_error(longspan("train", run_file(tmp_path), flag, value), 2, said)
    check_nothing_written(tmp_path)


def test_output_that_is_there_already(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    expect_error(longspan("train", run_file(tmp_path)), 2, "is not empty", "--overwrite")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_overwriting_waits_for_settings_that_can_work(tmp_path: Path) -> None:
    assert longspan("train", run_file(tmp_path))[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    expect_error(longspan("train", run_file(tmp_path), "--overwrite", "--data-files", "none*"), 2, "matches no file")
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_a_loss_that_is_not_finite_leaves_whole_rows_and_no_model(tmp_path: Path) -> None:
    arguments = ("--optimizer-lr", "1e30", "--max-steps", "5")
    expect_error(longspan("train", run_file(tmp_path), *arguments), 1, "Step 2: loss", "Lower optimizer.lr (1e+30)")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "run.json", "report.html"}
    assert [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()] == [1]


@pytest.mark.dist
@pytest.mark.slow
def test_an_error_of_several_processes_is_told_once(tmp_path: Path) -> None:
    arguments = ("--optimizer-lr", "1e30", "--max-steps", "5", "--sequence-parallel-size", "2")
    expect_error(started("train", run_file(tmp_path), *arguments), 1, "Step 2: loss", "The step was not applied")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "run.json", "report.html"}
    assert "The run failed" in (tmp_path / "out" / "report.html").read_text()


def test_a_run_on_one_process(tmp_path: Path) -> None:
    code, out, err = longspan("train", run_file(tmp_path), "--no-save-final")
    assert code == 0, err
    assert out.splitlines()[-1] == f"output_dir: {tmp_path / 'out'}"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "run.json", "report.html"}
    facts = json.loads((tmp_path / "out" / "run.json").read_text())
    assert facts["data"].startswith("1 documents") and facts["end"]["kind"] == "ended"
    code, out, err = longspan("train", run_file(tmp_path), "--overwrite", "--json")
    assert code == 0, err
    assert json.loads(out) == {"output_dir": str(tmp_path / "out"), "steps": 2}
    assert "step 2/2" in err


@pytest.mark.parametrize(
    ("arguments", "rel"),
    [
        (("--compute-dtype", "bfloat16"), 1e-2),
        (("--engine", "ddp"), 1e-6),
        (("--engine", "fsdp2"), 1e-6),
    ],
)
def test_one_process_runs_with_any_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], rel: float
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that what the run sets is undone
        monkeypatch.delenv(name)
    file = run_file(tmp_path, max_steps=3)
    assert longspan("train", file, "--output-dir", tmp_path / "single")[0] == 0
    code, out, err = longspan("train", file, "--nproc", "1", *arguments)
    assert code == 0, err
    assert out.splitlines()[-1] == f"output_dir: {tmp_path / 'out'}"
    assert not dist.is_initialized()
    assert curve(tmp_path / "out") == pytest.approx(curve(tmp_path / "single"), rel=rel)
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("out", "single")]
    assert weights[0].keys() == weights[1].keys()
    assert all(value.dtype == torch.float32 for value in weights[0].values())


@pytest.mark.parametrize(("rank", "local_rank", "speaks"), [(0, 0, True), (2, 0, True), (3, 1, False)])
def test_under_torchrun_the_first_process_of_each_host_tells_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int, speaks: bool
) -> None:
    here = {"RANK": rank, "LOCAL_RANK": local_rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in {**here, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch, "_PATIENCE_S", 0.0)
    done = longspan("train", run_file(tmp_path), "--data-files", tmp_path / "none*.txt")
    if speaks:
        expect_error(done, 2, "data.files", "matches no file")
    else:
        assert done == (2, "", "")
    check_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("local_rank", "restarts", "arguments", "said"),
    [(0, 0, (), "is not empty"), (1, 0, (), "is not empty"), (0, 1, ("--overwrite",), "--resume")],
)
def test_under_torchrun_output_that_is_there_already_is_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    local_rank: int,
    restarts: int,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    """The second process of a host gives the first one's word the time to end it."""
    here = {"RANK": 0, "LOCAL_RANK": local_rank, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    for name, value in {**here, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": restarts}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    waited = list[float]()
    monkeypatch.setattr(launch, "time", SimpleNamespace(sleep=waited.append))

    def end(error: Exception) -> None:
        raise error

    monkeypatch.setattr(launch.failures, "end", end)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("x")
    expect_error(longspan("train", run_file(tmp_path), *arguments), 2, said)
    assert len(waited) == local_rank
    assert [path.read_text() for path in (tmp_path / "out").iterdir()] == ["x"]
    assert not dist.is_initialized()


def curve(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [value for row in rows for value in (row["loss"], row["grad_norm"], row["tokens"])]


@pytest.mark.parametrize("keep", ["x+O+KV", "x+O", "x"])
def test_the_curve_does_not_depend_on_what_is_kept(tmp_path: Path, keep: str) -> None:
    file, folder = run_file(tmp_path, max_steps=3), tmp_path / "tiles"
    assert longspan("train", file)[0] == 0
    arguments = ("--memory-keep", keep, "--memory-tile-tokens", "24", "--output-dir", folder)
    code, _, err = longspan("train", file, *arguments)
    assert code == 0, err
    assert curve(folder) == pytest.approx(curve(tmp_path / "out"), rel=1e-5)


@pytest.mark.dist
@pytest.mark.slow
def test_the_curve_and_the_model_do_not_depend_on_the_division(tmp_path: Path) -> None:
    file = run_file(tmp_path, max_steps=3)
    divisions = {"one": ("1", "1", "single", "2"), "ddp": ("1", "2", "ddp", "1"), "fsdp2": ("2", "2", "fsdp2", "2")}
    losses, weights = {}, {}
    for name, (size, processes, engine, accumulation) in divisions.items():
        folder = tmp_path / name
        arguments = ["--sequence-parallel-size", size, "--nproc", processes, "--engine", engine]
        arguments += ["--gradient-accumulation-steps", accumulation, "--output-dir", str(folder)]
        code, out, err = started("train", file, *arguments)
        assert code == 0, err
        assert out.splitlines()[-1] == f"output_dir: {folder}"
        losses[name] = curve(folder)
        weights[name] = load_file(folder / "model" / "model.safetensors")
    for name in divisions:
        assert losses[name] == pytest.approx(losses["one"], rel=1e-5), name
        for parameter, value in weights["one"].items():
            assert weights[name][parameter].sub(value).norm() <= 1e-4 * value.norm(), (name, parameter)


def test_doctor() -> None:
    code, out, _ = longspan("doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["versions"]["torch"]
    assert facts["kernels"]["reference"] is None
    assert "kernel" in longspan("doctor")[1]


def test_help_lists_every_setting_with_its_default() -> None:
    text = longspan("train", "--help")[1]
    assert "--optimizer-lr" in text
    assert "default 2e-05" in text.replace("\n", " ")


def test_shells_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as left:
        main(["--show-completion", "bash"])
    assert not left.value.code and "complete" in out.getvalue()

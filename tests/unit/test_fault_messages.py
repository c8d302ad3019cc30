"""What is said of a fault, and in which words it is recognised."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from longspan.cli import failures, launch
from longspan.config import RunConfig, parse_config
from longspan.errors import ConfigError, TrainingError
from longspan.integrations.planning import cluster_for, task_for
from longspan.integrations.shapes import model_shape
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB
from longspan.train import explain, shortage
from longspan.train.watchdog import report_file


def config_of(folder: str, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"name": "llama-1b", "init": "random"},
        "data": {"files": "a"},
        "sequence_length": "256K",
        "max_steps": 9,
        "output_dir": folder,
    }
    return parse_config({**values, **changes})


@pytest.mark.parametrize(
    ("error", "short", "lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True, False),
        (MemoryError(), True, False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True, False),
        (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited"), False, True),
        (dist.DistNetworkError("The client socket has timed out"), False, True),
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1"), False, False),  # there is no group
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
    ],
)
def test_faults_are_told_apart(error: Exception, short: bool, lost: bool) -> None:
    assert (explain.is_shortage(error), explain.is_loss(error)) == (short, lost)


def test_a_process_that_its_watchdog_ended_has_left_word(tmp_path: Path) -> None:
    job = launch.Job(config_of(str(tmp_path)).model_dump_json(), "", str(tmp_path), False, "")
    assert "said nothing; was it killed?" in str(launch._silent(job, 1, -9))
    report_file(tmp_path, 1).write_text("longspan: process 1 hangs.\nthread MainThread:\n")
    said = str(launch._silent(job, 1, 1))
    assert said == f"longspan: process 1 hangs. Its stacks are in {tmp_path / 'watchdog-rank1.txt'}."


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (TrainingError("no room"), 1, "Error: no room\n"),
        (ConfigError("no such"), 2, "Error: no such\n"),
        (KeyError("x"), 1, "KeyError: 'x'\n"),
    ],
)
def test_a_process_of_torchrun_ends_at_once(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(failures.os, "_exit", codes.append)
    failures.end(error)
    assert codes == [code] and capsys.readouterr().err == said


def task_on(gpus: int, memory_gib: int) -> Any:
    cluster = cluster_for(find_machine("h200"), gpus, 8, memory_gib * GIB, 256 * GIB)
    return task_for(model_shape("llama-1b"), cluster, "ddp", "adamw")


@pytest.mark.parametrize(
    ("told", "code", "saved", "said"),
    [
        (False, -15, False, "ended with exit code -15 and said nothing; was it killed?"),
        (True, -9, False, "ended with exit code -9 and said nothing; was it killed?"),
        (True, -15, False, "Stopped by SIGTERM before there was a step to save"),
        (True, -15, True, ""),
    ],
)
def test_processes_that_sigterm_ended_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool, code: int, saved: bool, said: str
) -> None:
    job = launch.Job(config_of(str(tmp_path / "out")).model_dump_json(), "", str(tmp_path), False, "")
    for name, there in (("told", told), ("stopped", saved)):
        if there:
            (tmp_path / name).write_text("7")

    def fail(job: Any) -> None:
        raise ChildFailedError("longspan", {1: ProcessFailure(1, 1, code, "")})

    monkeypatch.setattr(launch, "elastic_launch", lambda config, entry: fail)
    if said:
        with pytest.raises(TrainingError, match=said):
            launch._launch(job, 2)
    else:
        assert launch._launch(job, 2) == 7


def test_ways_out_are_planned_to_fit() -> None:
    """On a GPU whose memory a row of 256K just fills, each way fits into nine tenths of it; the fastest comes first."""
    task = task_on(2, 34)
    tokens = 256 * 1024
    config = config_of("x", memory={"keep": "x", "tile_tokens": "8K"}, save={"every": 5})
    assert task.fits(tokens)
    ways = list(shortage._ways(config, task))
    names = [way.text for way in ways]
    assert "optimizer.kind: adamw-host" in names
    assert ("optimizer.kind: adamw8bit" in names) == (find_spec("torchao") is not None)
    again = [way.text for way in shortage._ways(config.model_copy(update={"resume": True}), task)]
    assert not any("optimizer" in text for text in again), "a checkpoint is of one optimizer"
    assert all(way.token_s > 0 for way in ways)
    assert shortage._fewer(config, task) <= tokens * 3 // 4


def test_more_ranks_share_a_sequence_where_there_are_replicas() -> None:
    from dataclasses import replace

    from longspan.plan.degrees import Degrees

    task = replace(task_on(4, 139), degrees=Degrees(1, 1, ""))
    names = [way.text for way in shortage._ways(config_of("x"), task)]
    assert {"sequence_parallel_size: 2", "sequence_parallel_size: 4"} <= set(names)
    assert any(name.startswith("memory.keep: x with memory.tile_tokens: ") for name in names)

"""Processes of a check end together, and the first error comes home."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import time
from pathlib import Path
from typing import Any

import pytest

from longspan.check.settings import Settings
from longspan.cli import ranks
from longspan.cli.check import CheckJob
from longspan.cli.model import named_config
from longspan.errors import ConfigError, ModelError, TopologyError, TrainingError


def test_one_that_fails_ends_the_others() -> None:
    context = mp.get_context("fork")
    processes = [context.Process(target=time.sleep, args=(60,)), context.Process(target=os._exit, args=(3,))]
    started = time.monotonic()
    for process in processes:
        process.start()
    ranks._wait(processes)
    assert processes[0].is_alive()
    ranks._end(processes)
    assert [process.exitcode for process in processes] == [-15, 3]
    assert time.monotonic() - started < 20


def test_the_earliest_error_is_raised_as_what_it_was(tmp_path: Path) -> None:
    for rank, (time_s, kind) in enumerate([(2.0, "TrainingError"), (1.0, "ModelError")]):
        report = {"time_s": time_s, "kind": kind, "text": f"rank {rank}"}
        (tmp_path / f"error-{rank}.json").write_text(json.dumps(report))
    with pytest.raises(ModelError, match="rank 1"):
        ranks._result(tmp_path, [1, 1])


def test_a_killed_process_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"Process 1 ended with exit code -9 .*killed"):
        ranks._result(tmp_path, [0, -9])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"--model: .*config"),
        ("{nope", r"--model: .*not a valid JSON"),
        ('{"model_type": "no-such-family"}', r"--model: .*no-such-family"),
        ('{"model_type": "llama", "hidden_size": -3}', r"--model: "),
        ('{"model_type": "llama", "rope_parameters": 7}', r"--model: "),
    ],
)
def test_what_is_wrong_with_a_model_folder_is_a_config_error(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        named_config(str(tmp_path))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(ranks.choose_device("auto", rank, 2)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert str(ranks.choose_device("auto", 0, 3)) == str(ranks.choose_device("cpu", 1, 2)) == "cpu"
    assert chosen == [0, 1]
    with pytest.raises(TopologyError, match="4 processes need 4 GPUs, found 2"):
        ranks.choose_device("cuda", 0, 4)


def test_errors_of_the_processes_reach_the_caller() -> None:
    with pytest.raises(ConfigError, match="The model has 2 layers; take 1 to 2 of them, not 5"):
        ranks.start(CheckJob(Settings("tiny-llama", 2, layers=5), "cpu"))

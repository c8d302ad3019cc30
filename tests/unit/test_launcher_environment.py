"""The environment of each launcher, as it sets it, becomes what torchrun would have set."""

from __future__ import annotations

import io
import os
import socket

import pytest
import torch

from longspan.cli import launch, launchers, main
from longspan.cli.launchers import first_node, launched, of_slurm, without_local_rank
from longspan.config import RunConfig
from longspan.errors import ConfigError
from longspan.train.data import Corpus

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {  # task 5 of `srun --nodes 3 --ntasks-per-node 2`, Slurm 22.05
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "127.0.0.[1-2,7]",
    "SLURM_PROCID": "5",
    "SLURM_GTIDS": "4,5",
    "SLURM_LOCALID": "1",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Take all launchers' variables away, and later what a test has set."""
    for name in list(os.environ):
        if name in TORCHRUN or name.startswith("SLURM_") or name == "LOCAL_SIZE":
            monkeypatch.delenv(name)
    for name in TORCHRUN:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def set_all(started: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        started.setenv(name, value)


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in TORCHRUN if name in os.environ}


def test_torchrun_says_it_all(started: pytest.MonkeyPatch) -> None:
    assert not launched()
    set_all(started, TORCHRUN | SLURM | {"SLURM_PROCID": "0"})  # torchrun under srun: its own word counts
    assert launched() and environment() == TORCHRUN


def test_deepspeed_calls_one_of_it_otherwise(started: pytest.MonkeyPatch) -> None:
    set_all(started, {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"})
    with pytest.raises(ConfigError, match=r"RANK is set.* but LOCAL_WORLD_SIZE is not.*unset RANK"):
        launched()
    started.setenv("LOCAL_SIZE", "2")
    assert launched() and environment() == TORCHRUN


def test_tasks_of_slurm(started: pytest.MonkeyPatch) -> None:
    set_all(started, SLURM)
    expected = TORCHRUN | {"MASTER_PORT": str(20000 + (12345 + 2 * 1009) % 10000)}
    assert launched() and environment() == expected
    assert launched() and environment() == expected, "asked twice it is as it was"
    assert of_slurm(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1"}) == TORCHRUN | {
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1",
    }
    assert of_slurm(SLURM)["MASTER_PORT"] != of_slurm(SLURM | {"SLURM_STEP_ID": "3"})["MASTER_PORT"]


@pytest.mark.parametrize(
    "values",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a batch script
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_GTIDS": "0", "SLURM_PROCID": "0"},
    ],
)
def test_a_single_task_starts_processes_of_its_own(started: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    set_all(started, values)
    assert not launched() and not environment()


@pytest.mark.parametrize("name", sorted(set(SLURM) - {"SLURM_STEP_NUM_TASKS"}))
def test_what_slurm_did_not_say_is_named(started: pytest.MonkeyPatch, name: str) -> None:
    set_all(started, {other: value for other, value in SLURM.items() if other != name})
    with pytest.raises(ConfigError, match=f"one of 6 tasks, but {name} is not set"):
        launched()
    assert not environment()


def test_tasks_that_go_round_the_nodes_are_refused() -> None:
    """As with `--distribution=cyclic`."""
    with pytest.raises(ConfigError, match=r"Tasks \[2, 5\] share a node.*--distribution=block"):
        of_slurm(SLURM | {"SLURM_GTIDS": "2,5"})
    assert of_slurm(SLURM | {"SLURM_GTIDS": "5", "SLURM_LOCALID": "0"})["LOCAL_WORLD_SIZE"] == "1"


def test_a_first_node_that_cannot_be_looked_up_is_refused(started: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    set_all(started, SLURM)
    started.setattr(launchers.socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1, which .* cannot look up .*set MASTER_ADDR"):
        launched()


def test_a_task_that_sees_fewer_gpus_than_its_node_has_tasks_is_refused(started: pytest.MonkeyPatch) -> None:
    """As with `--gpus-per-task=1`."""
    set_all(started, TORCHRUN)
    started.setattr(torch.cuda, "is_available", lambda: True)
    started.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 processes on this host, which see 1 GPUs.*--gpus-per-node"):
        launch._train_as_rank(RunConfig.model_construct(), Corpus.__new__(Corpus), io.StringIO(), "")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("node1", "node1"),
        ("node[1-3]", "node1"),
        ("gpu[003-005,7],login", "gpu003"),
        ("a-2,b[1-2]", "a-2"),
        ("rack[2-3]n[04,09].site,x", "rack2n04.site"),
    ],
)
def test_first_node(text: str, first: str) -> None:
    assert first_node(text) == first


def test_a_list_without_a_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no node"):
        first_node("")


def test_deepspeeds_argument_is_left_out_where_it_says_nothing_new(
    started: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert without_local_rank([]) == []
    assert without_local_rank(["--local_rank=1", "train"]) == ["--local_rank=1", "train"]
    started.setenv("LOCAL_RANK", "1")
    assert without_local_rank(["--local_rank=1", "train", "--x"]) == ["train", "--x"]
    assert without_local_rank(["--local-rank=1", "train"]) == ["train"]
    assert without_local_rank(["--local_rank=0", "train"]) == ["--local_rank=0", "train"]
    assert without_local_rank(["train", "--local_rank=1"]) == ["train", "--local_rank=1"]
    with pytest.raises(SystemExit) as ended:
        main(["--local_rank=1", "train", "--help"])
    assert ended.value.code == 0 and "RUN.YAML" in capsys.readouterr().out

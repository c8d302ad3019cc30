"""Starts of one run under torchrun: all processes agree whether they go on, and only ever with what is their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from longspan.cli import launch
from longspan.errors import ConfigError
from longspan.train import loop
from runs import Killed, config_of, result, run

pytestmark = pytest.mark.dist

Counts = tuple[int, int]
FIRST: Counts = (0, 0)
NEW = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}, "overwrite": True}
"""Another learning rate, in the same folder."""


@pytest.fixture
def torchrun() -> Iterator[int]:
    """The port of a store that outlasts a run's starts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def start(
    folder: str, port: int | None, counts: Counts, changes: dict[str, Any], dies: str = ""
) -> tuple[str, bool | None]:
    """Start as one of torchrun's processes; return what was told, or refused, and whether it went on.

    Args:
        port: of torchrun's store; None where it keeps none.
        counts: how often each host's torchrun has started its processes again.
        dies: in "building" the model or before "step 4".
    """
    rank = dist.get_rank()
    told = {"TORCHELASTIC_RESTART_COUNT": str(counts[rank]), "TORCHELASTIC_USE_AGENT_STORE": str(port is not None)}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or 0)}
    with patch.dict(os.environ, told):
        try:
            config, name = launch._begin_or_go_on(config_of(folder, **changes))
        except ConfigError as error:
            return str(error), None
    train = loop.train

    def build(*args: Any) -> Any:
        raise Killed

    with patch.object(loop, "train", lambda *args: train(*args, run=name)):
        if dies == "building":
            with patch.object(loop, "build_model", build):
                run(config)
            return "", config.resume
        return run(config, killed_in=4 if dies == "step 4" else 0)[1], config.resume


@pytest.fixture
def started(run_ranks: Any, tmp_path: Path) -> Any:
    """A function that starts the run in two processes and returns what the first has told, and whether both went on."""

    def begin(port: int | None, counts: Counts = FIRST, dies: str = "", **changes: Any) -> tuple[str, bool | None]:
        answers = run_ranks(2, start, str(tmp_path / "out"), port, counts, changes, dies)
        assert answers[0][1] == answers[1][1], "some go on, some do not"
        return answers[0]

    return begin


@pytest.mark.parametrize("counts", [(1, 0), (0, 1), (0, 0)], ids=["first host's", "other host's", "a host came"])
def test_a_run_goes_on_whoever_has_counted_its_starts(
    started: Any, torchrun: int, counts: Counts, tmp_path: Path
) -> None:
    """With --overwrite, which is about what was there before."""
    assert started(torchrun, dies="step 4", overwrite=True)[1] is False
    told, went_on = started(torchrun, counts, overwrite=True)
    assert went_on and "going on after step 2" in told
    assert [row[0] for row in result(str(tmp_path / "out"))[0]] == [1, 2, 3, 4, 5, 6]


def test_a_second_run_is_refused_also_when_it_is_started_again(started: Any, torchrun: int, tmp_path: Path) -> None:
    started(None, dies="step 4")
    before = sorted(tmp_path.rglob("*"))
    for counts in (FIRST, (1, 0), (0, 2)):
        told, went_on = started(torchrun, counts)
        assert went_on is None and "is not empty" in told
    assert sorted(tmp_path.rglob("*")) == before
    told, went_on = started(torchrun, resume=True)
    assert went_on and "going on after step 2" in told


def test_a_new_run_never_goes_on_from_an_older_ones_checkpoint(started: Any, torchrun: int, tmp_path: Path) -> None:
    """It dies before there is a model; started again, it begins, as it does where nothing was there."""
    started(None, dies="step 4")
    assert list((tmp_path / "out" / "checkpoints").iterdir())
    assert started(torchrun, dies="building", **NEW)[1] is False
    assert not list((tmp_path / "out").iterdir())
    told, went_on = started(torchrun, (1, 1), dies="step 4", **NEW)
    assert went_on is False and "going on" not in told
    told, went_on = started(torchrun, (2, 1), **NEW)
    assert went_on and "going on after step 2" in told
    found = result(str(tmp_path / "out"))
    shutil.rmtree(tmp_path / "out")
    started(None, **NEW)
    assert result(str(tmp_path / "out")) == found


@pytest.mark.parametrize("changes", [{}, {"overwrite": True}], ids=["plain", "overwrite"])
def test_without_torchruns_store_nothing_is_guessed(started: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    """What is there may be this run's, or an older one's."""
    assert started(None, dies="building", **changes)[1] is False
    assert started(None, (1, 0), dies="step 4", **changes)[1] is False, "nothing was there"
    before = sorted(tmp_path.rglob("*"))
    told, went_on = started(None, (0, 2), **changes)
    assert went_on is None and "--resume" in told and "--overwrite" in told and "torchrun's store" in told
    assert sorted(tmp_path.rglob("*")) == before
    told, went_on = started(None, (0, 2), resume=True)
    assert went_on and "going on after step 2" in told

"""What happens to a run of two processes when one of them is killed or hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from killing import Ended, Kill, kills, nursery
from runs import config_of, result

pytestmark = pytest.mark.dist

KILLS = int(os.environ.get("LONGSPAN_TEST_KILLS", "6"))
SEED = int(os.environ.get("LONGSPAN_TEST_SEED", "1"))
CHAIN = 3
"""Kills of one run before it may end."""

Attempt = Callable[..., Ended]


@pytest.fixture(scope="module")
def attempt() -> Iterator[Attempt]:
    with nursery() as make:
        yield make


def config(folder: Path, **changes: Any) -> Any:
    return config_of(str(folder / "out"), **{"max_steps": 8, "memory": {"keep": "graph"}, **changes})


@pytest.fixture(scope="module")
def whole(attempt: Attempt, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, float]:
    """What an undisturbed run records, and how long it takes."""
    folder = tmp_path_factory.mktemp("whole")
    ended = attempt(config(folder))
    assert ended.codes == (0, 0), ended.told
    return result(str(folder / "out")), ended.seconds


def test_killed_runs_end_as_if_they_had_not_been(attempt: Attempt, whole: Any, tmp_path: Path) -> None:
    """Each run is killed a few times, gone on with each time, and then left alone."""
    expected, seconds = whole
    planned, wheres = kills(KILLS, SEED, seconds / 2), []
    for number, start in enumerate(range(0, KILLS, CHAIN)):
        folder = tmp_path / str(number)
        folder.mkdir()
        changes = {"save": {"every": 2, "keep": 2, "asynchronous": number % 4 != 3}, "resume": True}
        for kill in planned[start : start + CHAIN]:
            ended = attempt(config(folder, **changes), kill)
            wheres.append(ended.where)
            assert ended.where is not None or ended.codes == (0, 0), ended.told
        ended = attempt(config(folder, **changes))
        assert ended.codes == (0, 0), ended.told
        assert result(str(folder / "out")) == expected
    killed = [where for where in wheres if where is not None]
    inside = [where for where in killed if where]
    print(f"{len(killed)} killed, {len(inside)} of them in a save: {sorted(inside)}")
    assert len(killed) >= 0.6 * KILLS and len(inside) >= 0.3 * KILLS

"""Committing checkpoints and thinning them out, on one process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from longspan.agreement import Agreement
from longspan.train import checkpoints
from longspan.train.checkpoints import Checkpoints


class Written:
    """A part that is on the disk at once."""

    busy = False

    def __init__(self, folder: Path, agree: Agreement) -> None:
        (folder / "engine" / "tag").mkdir(parents=True)
        (folder / "engine" / "tag" / "weights").write_text("weights")

    def result(self) -> None:
        pass

    def complete(self, results: list[Any]) -> None:
        assert results == [None]


def save(folder: Path, *steps: int, keep: int = 2, beside: tuple[Path, ...] = ()) -> Checkpoints:
    saved = Checkpoints(folder, keep, beside)
    for step in steps:
        saved.begin(step, {}, Written)
        saved.settle()
    return saved


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_oldest_are_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_what_was_just_saved_stays(tmp_path: Path) -> None:
    """Also where later ones that were not readable when the run went on are so again."""
    save(tmp_path, 8, 9)
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-00000004", "step-00000008", "step-00000009"]


def test_what_cannot_be_read_is_left_in_place(tmp_path: Path) -> None:
    save(tmp_path, 1, 9)
    for name in ("step-00000001", "step-00000009"):
        (tmp_path / name / "commit.json").unlink()
    save(tmp_path, 2, 3, 4)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004", "step-00000009"]


@pytest.mark.parametrize("how", ["rmtree", "rename"])
def test_a_failed_removal_stops_no_run(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What could not be removed is tried again, and does not stand in the way of its own step."""
    save(tmp_path, 1, 2)
    plain = Path.rename

    def rmdir(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    def rename(path: Path, to: Path) -> Path:
        if str(to).endswith(".gone.partial"):
            raise PermissionError(13, "Permission denied")
        return plain(path, to)

    broken = patch.object(os, "rmdir", rmdir) if how == "rmtree" else patch.object(Path, "rename", rename)
    with broken:
        saved = save(tmp_path, 3, 4)
        latest = saved.latest(print)
        assert latest is not None and latest.step == 4
        if how == "rmtree":
            save(tmp_path, 4)  # hidden once more
    assert ("Permission denied" in capsys.readouterr().err) == (how == "rename")
    save(tmp_path, 5)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_all_folders_are_on_the_disk(tmp_path: Path) -> None:
    """What belongs to a checkpoint first, what a folder holds before it, and what names the checkpoints last."""
    flushed: list[str] = []
    with patch.object(checkpoints, "_flush", lambda path: flushed.append(str(Path(path).relative_to(tmp_path)))):
        (tmp_path / "metrics.jsonl").write_text("a row")
        save(tmp_path / "out" / "checkpoints", 1, beside=(tmp_path / "metrics.jsonl", tmp_path / "none yet"))
    inside, home = "out/checkpoints/.step-00000001.partial", "out/checkpoints"
    below = [f"{inside}/engine/tag/weights", f"{inside}/engine/tag", f"{inside}/engine"]
    assert flushed == ["metrics.jsonl", *below, f"{inside}/commit.json", inside, home, "out"]
    shutil.rmtree(tmp_path / "out")

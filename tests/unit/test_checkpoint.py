"""Output folders: refused, cleared, and filled all or nothing."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from longspan.config import parse_config
from longspan.errors import ConfigError, TrainingError
from longspan.train import checkpoint
from longspan.train.checkpoint import check_output, clear_output, full_state, try_output, write_folder
from longspan.train.preflight import preflight
from longspan.train.watchdog import report_file


def write(path: Path, text: str) -> None:
    path.write_text(text)


def test_output_folders(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "deep", overwrite=False)
    assert not (tmp_path / "new").exists()
    check_output(tmp_path, overwrite=False)
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty.*--overwrite"):
        check_output(tmp_path, overwrite=False)
    check_output(tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="is a file"):
        check_output(tmp_path / "mine.txt", overwrite=True)
    with pytest.raises(ConfigError, match="cannot be created"):
        check_output(tmp_path / "mine.txt" / "out", overwrite=True)


def test_an_output_folder_is_made_and_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_output(tmp_path / "new" / "deep")
    try_output(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(checkpoint, "TemporaryFile", Mock(side_effect=full))
    with pytest.raises(ConfigError, match=r"output_dir .*deep cannot be written: No space left on device\. Name"):
        try_output(tmp_path / "new" / "deep")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, whose permissions promise too much")
def test_a_folder_that_cannot_be_made_stops_a_run_before_its_model(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("a text to train on")
    values = {
        "model": {"name": "tiny-llama", "init": "random"},
        "data": {"files": [str(tmp_path / "data.txt")]},
        "sequence_length": 64,
        "max_steps": 1,
        "output_dir": "/proc/x",
    }
    with pytest.raises(ConfigError, match="output_dir /proc/x cannot be (written|created)"):
        preflight(parse_config(values), 1)
    preflight(parse_config({**values, "output_dir": str(tmp_path / "out")}), 1)
    assert (tmp_path / "out").is_dir()


def test_clearing_leaves_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    (tmp_path / "metrics.jsonl").write_text("x")
    (tmp_path / "model").mkdir()
    (tmp_path / "watchdog-rank12.txt").write_text("x")
    clear_output(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_what_cannot_be_cleared_is_not_passed_over(tmp_path: Path) -> None:
    """Or a start might take it for its own."""
    (tmp_path / "elsewhere" / "step-00000002").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        clear_output(tmp_path / "out")


def test_a_run_that_hung_at_once_has_left_nothing_to_lose(tmp_path: Path) -> None:
    report_file(tmp_path, 12).write_text("x")
    check_output(tmp_path, overwrite=False)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "model"
    write_folder(folder, lambda path: write(path / "a", "1"))
    assert (folder / "a").read_text() == "1"

    def full_disk(path: Path) -> None:
        write(path / "a", "2")
        raise OSError("No space left on device")

    with pytest.raises(TrainingError, match="No space left"):
        write_folder(folder, full_disk)
    assert (folder / "a").read_text() == "1"
    write_folder(folder, lambda path: write(path / "b", "3"))
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_tied_names_share_a_tensor() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    state = full_state(model, keep=True)
    assert state["embed.weight"] is state["head.weight"]
    assert torch.equal(state["embed.weight"], model["embed"].weight)  # pyright: ignore[reportArgumentType]
    assert full_state(model, keep=False) == {}

"""Disks that are full, read-only or damaged: the last good checkpoint is found, and the run ends as it should."""

from __future__ import annotations

import errno
import io
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from longspan.errors import TrainingError
from longspan.train import loop
from longspan.train.progress import Progress
from runs import STEPS, config_of, corpus, result

ALONE: dict[str, Any] = {"engine": "single", "sequence_parallel_size": 1, "gradient_accumulation_steps": 1}


def run(folder: Path, **changes: Any) -> str:
    told = io.StringIO()
    config = config_of(str(folder), **{**ALONE, "save": {"every": 2, "keep": 3}, **changes})
    loop.train(config, corpus(), torch.device("cpu"), Progress(told, STEPS))
    return told.getvalue()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    run(folder)
    return folder


@pytest.fixture
def cut(whole: Path, tmp_path: Path) -> Path:
    """The same run, ended after step 4."""
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000006")
    shutil.rmtree(tmp_path / "out" / "model")
    return tmp_path / "out"


class Stream:
    """A file that refuses from the n-th write on."""

    def __init__(self, file: Any, count: Callable[[], None]) -> None:
        self._file, self._count = file, count

    def write(self, data: Any) -> int:
        self._count()
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def refusing(what: str, turn: int, code: int, within: str = "/checkpoints") -> Iterator[None]:
    """Have the n-th call of a kind, and all later ones, fail; of those that name a path only with `within` in it."""
    calls = 0

    def count(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= turn:
            raise OSError(code, os.strerror(code))

    @contextmanager
    def stream(system: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        with plain(system, path, mode) as file:
            yield Stream(file, count) if "w" in mode else file

    def counted(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], Path) or within in str(args[0]):
            count()
        return plain(*args, **kwargs)

    holder, name = {
        "write": (FileSystem, "create_stream"),
        "fsync": (os, "fsync"),
        "rename": (Path, "rename"),
        "mkdir": (Path, "mkdir"),
        "write_text": (Path, "write_text"),
    }[what]
    plain = getattr(holder, name)
    with patch.object(holder, name, stream if what == "write" else counted):
        yield


REFUSALS = [
    *(("write", turn, errno.ENOSPC) for turn in (1, 2, 17, 90, 300)),
    *(("fsync", turn, errno.ENOSPC) for turn in (1, 2, 3, 5)),
    *(("rename", turn, errno.ENOSPC) for turn in (1, 2)),
    ("write_text", 1, errno.ENOSPC),
    ("write", 1, errno.EROFS),
    ("mkdir", 1, errno.EROFS),
    ("fsync", 1, errno.EIO),
]


CASES = [*((*refusal, True) for refusal in REFUSALS), *((*refusal, False) for refusal in REFUSALS[4::5])]


@pytest.mark.parametrize(("what", "turn", "code", "asynchronous"), CASES, ids=str)
def test_a_disk_that_refuses(whole: Path, cut: Path, what: str, turn: int, code: int, asynchronous: bool) -> None:
    save = {"every": 2, "keep": 3, "asynchronous": asynchronous}
    with refusing(what, turn, code), pytest.raises(TrainingError) as raised:
        run(cut, resume=True, save=save)
    said = str(raised.value)
    assert "Cannot write checkpoint" in said and "step-00000006: process 0 says" in said
    assert os.strerror(code) in said and "Earlier checkpoints are as they were." in said
    assert "going on after step 4" in run(cut, resume=True)
    assert result(str(cut)) == result(str(whole))


def test_metrics_that_cannot_be_written(cut: Path) -> None:
    with refusing("mkdir", 1, errno.EROFS, within="/out"), pytest.raises(TrainingError) as raised:
        run(cut, resume=True)
    assert str(raised.value).startswith("In step 5") and "Read-only file system" in str(raised.value)
    assert "going on after step 4" in run(cut, resume=True)


@pytest.mark.parametrize("limit_bytes", [1, 70_001, 300_007])
def test_a_file_that_cannot_grow(whole: Path, cut: Path, limit_bytes: int) -> None:
    """The system itself refuses, in the middle of a write."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    largest = max(path.stat().st_size for path in (cut / "checkpoints").rglob("*.distcp"))
    assert limit_bytes < largest
    only = patch.object(loop.MetricsFile, "write", lambda *args: None)  # the checkpoint is to meet the limit
    try:
        with (
            only,
            patch.object(loop.Saver, "begin", limited(limit_bytes, before[1])),
            pytest.raises(TrainingError) as no,
        ):
            run(cut, resume=True)
        assert "Cannot write checkpoint" in str(no.value) and "File too large" in str(no.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "going on after step 4" in run(cut, resume=True)
    assert result(str(cut)) == result(str(whole))


def limited(limit_bytes: int, hard: int) -> Callable[..., None]:
    plain = loop.Saver.begin

    def begin(saver: Any, step: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
        plain(saver, step)

    return begin


@pytest.mark.parametrize("seed", range(6))
def test_a_file_that_was_cut(whole: Path, cut: Path, seed: int) -> None:
    """Any file of the latest checkpoint, anywhere in it."""
    draw = random.Random(seed)
    folder = cut / "checkpoints" / "step-00000004"
    file = sorted(path for path in folder.rglob("*") if path.is_file())[seed % 3]
    os.truncate(file, draw.randrange(file.stat().st_size))
    told = run(cut, resume=True)
    assert "checkpoint step-00000004 is left out" in told and file.name in told
    assert "going on after step 2" in told
    assert result(str(cut)) == result(str(whole))


@pytest.mark.skipif(os.geteuid() == 0, reason="the first user may write everywhere")
def test_a_folder_that_cannot_be_written(whole: Path, cut: Path) -> None:
    (cut / "checkpoints").chmod(0o500)
    try:
        with pytest.raises(TrainingError, match="Cannot write checkpoint .*Permission denied"):
            run(cut, resume=True)
    finally:
        (cut / "checkpoints").chmod(0o700)
    assert "going on after step 4" in run(cut, resume=True)
    assert result(str(cut)) == result(str(whole))


def test_bytes_that_changed_without_a_change_of_size(cut: Path) -> None:
    """Sizes are what is compared; what then cannot be read is told as such, not as torch does."""
    tensors = next((cut / "checkpoints" / "step-00000004").glob("*.distcp"))
    tensors.write_bytes(bytes(tensors.stat().st_size))
    with pytest.raises(TrainingError, match=r"Checkpoint .*step-00000004 cannot be read \(\w+: .*remove it"):
        run(cut, resume=True)

"""The checkpoints of a run: written whole or not at all, found again, and thinned out."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from longspan.agreement import Agreement
from longspan.once import is_first

_COMMIT = "commit.json"
_GONE = ".gone.partial"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole.

    Args:
        about: what was written beside the tensors.
    """

    folder: Path
    step: int
    about: dict[str, Any]


class Part(Protocol):
    """What all processes are writing into the folder of a checkpoint."""

    @property
    def busy(self) -> bool:
        """Whether this process is still writing."""
        ...

    def result(self) -> Any:
        """Wait until this process has written; raise what stood in its way."""
        ...

    def complete(self, results: list[Any]) -> None:
        """Write, on the first process, what needs the results of all."""
        ...


@dataclass(frozen=True)
class _Flight:
    """A checkpoint that is being written."""

    folder: Path
    partial: Path
    about: dict[str, Any]
    part: Part
    agree: Agreement


class Checkpoints:
    """Folders `step-00000123` on a disk that all processes share; every method is collective.

    A checkpoint is written under another name, and if its `Part` can, while the caller goes on. Once all processes are
    done, `settle` has the first one list its files with their sizes in `commit.json` and rename the folder, so a folder
    without that list, or with a file of another size, is none: the run was killed, or the disk lost something.

    Args:
        keep: how many stay.
        beside: files that belong to what a checkpoint says, and are on the disk before it counts.
    """

    def __init__(self, folder: Path, keep: int, beside: tuple[Path, ...] = ()) -> None:
        self.folder, self.keep, self._beside = folder, keep, beside
        self._flight: _Flight | None = None

    def begin(self, step: int, about: dict[str, Any], write: Callable[[Path, Agreement], Part]) -> None:
        """Let all processes begin to `write` to a folder; the one before is settled first.

        Raises:
            TrainingError: some process could not; earlier checkpoints are as they were.
        """
        self.settle()
        name = f"step-{step:08}"
        partial = self.folder / f".{name}.partial"
        agree = Agreement(f"write checkpoint {self.folder / name}", "Earlier checkpoints are as they were.")
        agree(lambda: self._make(partial) if is_first() else None)
        self._flight = _Flight(self.folder / name, partial, {**about, "step": step}, write(partial, agree), agree)

    @property
    def busy(self) -> bool:
        """Whether this process is still writing one, so that `settle` would wait."""
        return self._flight is not None and self._flight.part.busy

    def settle(self) -> None:
        """Commit what `begin` began, once all have written; remove the oldest of more than `keep` that are whole.

        A checkpoint that cannot be removed stops no run: stderr hears of it.

        Raises:
            TrainingError: some process could not write; earlier checkpoints are as they were.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        results = flight.agree(flight.part.result)
        flight.agree(lambda: self._finish(flight, results) if is_first() else None)

    def latest(self, tell: Callable[[str], None]) -> Saved | None:
        """Return the last checkpoint that is whole; `tell` hears of later ones that are not, on the first process.

        Raises:
            TrainingError: the first process cannot look.
        """
        agree = Agreement(f"look for checkpoints in {self.folder}", "See that all processes can read it.")
        return agree(lambda: self._latest(tell) if is_first() else None)[0]

    def _latest(self, tell: Callable[[str], None]) -> Saved | None:
        for folder in self._folders():
            problem, about = _examine(folder)
            if problem is None:
                return Saved(folder, int(about["step"]), about)
            tell(f"checkpoint {folder.name} is left out: {problem}")
        return None

    def _make(self, partial: Path) -> None:
        self._sweep()
        partial.mkdir(parents=True)

    def _finish(self, flight: _Flight, results: list[Any]) -> None:
        flight.part.complete(results)
        for path in self._beside:
            if path.exists():
                _flush(path)
        _commit(flight.partial, flight.folder, flight.about)
        try:
            self._thin(flight.folder)
        except OSError as error:
            print(f"longspan: old checkpoints in {self.folder} are not removed: {error}", file=sys.stderr)

    def _folders(self) -> list[Path]:
        """Return the checkpoints, the latest first."""
        named = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in named if _NAME.fullmatch(path.name) and path.is_dir()), reverse=True)

    def _thin(self, new: Path) -> None:
        """Remove what is older than the last `keep` that are whole, but not the new one.

        What is not whole stays: a disk may give later what it does not give now.
        """
        good = [folder for folder in self._folders() if _examine(folder)[0] is None]
        for folder in good[self.keep :]:
            if folder != new:
                _hide(folder)
        self._sweep()

    def _sweep(self) -> None:
        """Remove what earlier attempts left; what cannot be removed is tried again at the next checkpoint."""
        for path in self.folder.glob(".*.partial"):
            shutil.rmtree(path, ignore_errors=path.name.endswith(_GONE))


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _COMMIT)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _commit(partial: Path, folder: Path, about: dict[str, Any]) -> None:
    for path in sorted(partial.rglob("*"), key=lambda path: len(path.parts), reverse=True):  # folders after their files
        _flush(path)
    marker = partial / _COMMIT
    marker.write_text(json.dumps({**about, "files": _sizes(partial)}), encoding="utf-8")
    _flush(marker)
    _flush(partial)
    if folder.exists():  # of a step that is taken again
        _hide(folder)
    partial.rename(folder)
    _flush(folder.parent)
    _flush(folder.parent.parent)  # the first checkpoint of a run makes the folder of all


def _hide(folder: Path) -> None:
    """Rename what is to be removed, so that half of it is never taken for a checkpoint."""
    folder.rename(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=_GONE, dir=folder.parent))  # a name that is free


def _flush(path: Path) -> None:
    """Have a file or folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _examine(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """Return what is wrong with a checkpoint, None if nothing is, and what its list says."""
    try:
        about = json.loads((folder / _COMMIT).read_text(encoding="utf-8"))
        listed = {str(name): int(size) for name, size in about["files"].items()}
        int(about["step"])
    except FileNotFoundError:
        return f"it has no {_COMMIT}, so it was not finished", {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {_COMMIT} cannot be read ({type(error).__name__})", {}
    there = _sizes(folder)
    for name, size in listed.items():
        if there.get(name) != size:
            has = "is missing" if name not in there else f"has {there[name]:,} bytes"
            return f"{name} {has} where {size:,} were written", {}
    return None, about

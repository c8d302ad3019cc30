"""Bring the error of a started process home to the one that started it, of the same kind and once."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from longspan import errors
from longspan.errors import LongspanError, TrainingError


def leave(folder: Path, rank: int, error: Exception) -> NoReturn:
    """Write down why this process fails and end it.

    It ends at once: leaving in order would wait for the other ranks, up to the time-out of a collective.
    """
    ours = isinstance(error, LongspanError)
    kind = type(error).__name__ if ours else TrainingError.__name__
    text = str(error) if ours else f"Process {rank} failed.\n{traceback.format_exc()}"
    report = json.dumps({"time_s": time.time(), "kind": kind, "text": text})
    (folder / f"error-{rank}.json").write_text(report, encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def end(error: Exception) -> NoReturn:
    """Say why this process, which a launcher started, fails, and end it at once; see `leave`."""
    if isinstance(error, LongspanError):
        print(f"Error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if isinstance(error, LongspanError) and isinstance(error, ValueError) else 1)


def first(folder: Path) -> LongspanError | None:
    """Return the earliest error that a process left; None where none did."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("error-*.json")]
    if not reports:
        return None
    earliest = min(reports, key=lambda report: report["time_s"])
    return getattr(errors, earliest["kind"])(earliest["text"])

"""SIGTERM to a process that has started others, which would go on without it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

_TOLD = "told"


@contextmanager
def passing_on(folder: Path) -> Iterator[None]:
    """Pass SIGTERM on to the processes that have called `hear`, also to those that call it later.

    For torch's launcher raises where it is told, and then waits for processes of which each waits for it: after 30
    seconds it kills them, though they have saved and ended, and though a step may take minutes.

    Args:
        folder: that all of them share.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        (folder / _TOLD).touch()
        for file in folder.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.stem), signal.SIGTERM)

    with _handled_by(pass_on):
        yield


@contextmanager
def leaving() -> Iterator[None]:
    """Leave the program where SIGTERM comes, so that what was started is ended in order; a second one cuts nothing off.

    Raises:
        SystemExit: it came.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit("Error: Stopped by SIGTERM; its processes have ended.")

    with _handled_by(stop):
        yield


@contextmanager
def _handled_by(handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def deaf_forkserver() -> None:
    """Start the process that others are forked from, so that SIGTERM to all of a group does not end it.

    With it the launcher would lose sight of its processes. They are deaf too, until they call `hear`.
    """
    with _handled_by(signal.SIG_IGN):
        forkserver.ensure_running()


def hear(folder: Path) -> None:
    """Be told of SIGTERM from now on, and of one that has come."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    (folder / f"{os.getpid()}.pid").touch()
    if was_told(folder):
        os.kill(os.getpid(), signal.SIGTERM)


def was_told(folder: Path) -> bool:
    """Whether SIGTERM has come."""
    return (folder / _TOLD).exists()

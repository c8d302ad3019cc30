"""SIGTERM to a process that has started others, which would go on without it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

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


class Leaving:
    """Leave the program where SIGTERM comes, so that what was started is ended in order; a second one cuts nothing off.

    Raises:
        SystemExit: it came.
    """

    def __init__(self) -> None:
        self._held = self._came = False
        self._handled = _handled_by(self._stop)

    def __enter__(self) -> Leaving:
        self._handled.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handled.__exit__(kind, error, tb)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave at the end of the block only: a process that is half started could not be ended."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._came:
            self._leave()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._came = True
        if not self._held:
            self._leave()

    def _leave(self) -> NoReturn:
        raise SystemExit("Error: Stopped by SIGTERM; its processes have ended.")


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

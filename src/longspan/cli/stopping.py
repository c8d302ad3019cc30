"""SIGTERM to the process that has started others: they stop as if each had been told, and it waits for them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

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

    if threading.current_thread() is not threading.main_thread():  # which alone hears signals
        yield
        return
    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def hear(folder: Path) -> None:
    """Be told of SIGTERM from now on, and of one that has come."""
    (folder / f"{os.getpid()}.pid").touch()
    if was_told(folder):
        os.kill(os.getpid(), signal.SIGTERM)


def was_told(folder: Path) -> bool:
    """Whether SIGTERM has come."""
    return (folder / _TOLD).exists()

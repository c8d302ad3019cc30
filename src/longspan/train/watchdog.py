"""End a process that hangs, and say where it did."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout, _world

from longspan.train.pulse import Pulse

FIRST = 3
"""How many times as long the first step may take: models are built and read, and code is compiled."""

REPORTS = "watchdog-rank*.txt"
"""What watchdogs leave in a folder, see `report_file`."""

_LOOK_S = 5.0
_STORE_TIMEOUT = timedelta(seconds=5)


class Word:
    """Tells the other processes where this one is, and asks where they are, in a thread of its own: where the first
    host, which keeps the store, is gone or cut off, it waits for an answer without end, and nobody waits for it.

    Cost: a message to the store every few seconds.
    """

    def __init__(self, pulse: Pulse, rank: int, look_s: float) -> None:
        self._pulse, self._rank, self._look_s = pulse, rank, look_s
        self._ended = threading.Event()
        self._asked, self._answered = threading.Event(), threading.Event()
        self._others: list[str] = []

    def start(self) -> None:
        """Begin to tell."""
        store: Any = _get_default_store()
        own = store.clone()  # the training thread may hold on to the other one
        own.set_timeout(_STORE_TIMEOUT)
        self._thread = threading.Thread(target=self._talk, args=(own,), name="word", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Tell no more."""
        self._ended.set()
        self._asked.set()
        self._thread.join(1.0)  # it may wait for the store

    def of_others(self) -> list[str]:
        """Return where each process was when it last left word."""
        self._asked.set()
        if not self._answered.wait(_STORE_TIMEOUT.total_seconds()):
            return ["the processes' store does not answer: the first host is down, or the link to it"]
        return self._others

    def _talk(self, store: Any) -> None:
        while not self._ended.is_set():
            try:
                store.set(_key(self._rank), json.dumps([time.time(), str(self._pulse.now)]))
                if self._asked.is_set():
                    self._others = [self._line(store, rank) for rank in range(dist.get_world_size())]
                    self._answered.set()
                    return
            except RuntimeError:  # slow, or gone, which the training thread will notice by itself
                self._ended.wait(self._look_s)
            self._asked.wait(self._look_s)

    def _line(self, store: Any, rank: int) -> str:
        told = store.get(_key(rank)) if store.check([_key(rank)]) else None
        if told is None:
            return f"process {rank}: has not reported"
        time_s, where = json.loads(told)
        age_s = time.time() - time_s
        silent = f", and has not reported for {age_s:.0f} s" if age_s > 3 * self._look_s else ""
        return f"process {rank}: {where}{silent}"


class Watchdog:
    """Watches a run's pulse from a thread, and ends the process if it hangs.

    Where it hangs so deep in foreign code that no Python thread runs, a thread of the interpreter's own prints the
    stacks and ends it a little later.

    Args:
        limit_s: longest time of a step; `FIRST` times as long for the first.
        folder: where `watchdog-rank<n>.txt` is written if it comes to that.

    Cost: as `Word`; nothing in the training thread.
    """

    def __init__(self, pulse: Pulse, limit_s: float, folder: Path) -> None:
        self._pulse, self._limit_s = pulse, limit_s
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._file = report_file(folder, self._rank)
        self._look_s = min(_LOOK_S, limit_s / 10)
        self._ended = threading.Event()
        self._word = Word(pulse, self._rank, self._look_s) if dist.is_initialized() else None

    def __enter__(self) -> Self:
        self._file.unlink(missing_ok=True)  # of an earlier run
        if self._word is not None:
            self._word.start()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        if self._word is not None:
            self._word.end()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            limit_s = self._limit_s if self._pulse.steps else FIRST * self._limit_s
            last_s = limit_s + 6 * self._look_s + _STORE_TIMEOUT.total_seconds()
            faulthandler.dump_traceback_later(last_s, exit=True, file=sys.__stderr__)  # pyright: ignore[reportArgumentType]
            if time.monotonic() - self._pulse.beat_s > limit_s:
                self._end(limit_s)
            if self._ended.wait(self._look_s):
                return

    def _end(self, limit_s: float) -> None:
        report = self._report(limit_s)
        print(report, file=sys.__stderr__, flush=True)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(report, encoding="utf-8")
        except OSError as error:
            print(f"longspan: {self._file} cannot be written: {error}", file=sys.__stderr__, flush=True)
        time.sleep(2 * self._look_s)  # the others hang as well: once this one is gone, they fail before they tell where
        os._exit(1)

    def _report(self, limit_s: float) -> str:
        now = self._pulse.now
        where = f"{now}, for {time.monotonic() - now.since_s:.0f} s"
        waited_s, first = time.monotonic() - self._pulse.beat_s, "" if self._pulse.steps else "for the first step "
        said = (
            f"longspan: process {self._rank} has not ended a step for {waited_s:.0f} s: {where}. It is ended "
            f"with exit code 1, as faults.timeout_minutes allows {limit_s / 60:.3g} minutes {first}in all. Go on from "
            "the last checkpoint with --resume, or let torchrun --max-restarts do it. If a step really takes that "
            "long, raise faults.timeout_minutes."
        )
        others = [] if self._word is None else self._word.of_others()
        return "\n".join([said, *others, *_stacks()])


def report_file(folder: Path, rank: int) -> Path:
    """Return where a process that its watchdog ends leaves word."""
    return folder / REPORTS.replace("*", str(rank))


def wait_longer(limit_s: float) -> None:
    """Let collectives of all groups but the default one wait longer than a watchdog, which knows more to tell."""
    if not dist.is_initialized():
        return
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            _set_pg_timeout(patience(limit_s), group)


def patience(limit_s: float) -> timedelta:
    """Return how long collectives wait where a watchdog ends what takes longer than `limit_s`."""
    return timedelta(seconds=FIRST * limit_s + 60)


def _key(rank: int) -> str:
    return f"longspan/watchdog/{rank}"


def _stacks() -> list[str]:
    """Return what each thread is at, the training thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = threading.main_thread().ident
    lines = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        if ident != threading.get_ident():
            lines.append(f"thread {names.get(ident, ident)}:")
            lines.extend(line.rstrip() for line in traceback.format_stack(frames[ident]))
    return lines

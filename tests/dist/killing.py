"""Run a short training in two processes that can be killed at any moment, quickly: they are forks of one that has
imported everything."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.config import RunConfig

_WORLD = 2
_STAY_S = 0.05
"""How long a process stays in the phase that it is to be killed in."""

PHASES = ("make", "plan", "copy", "write", "item", "table", "commit", "flush", "renamed", "thin", "settled")
"""Of a save, as `_hook` finds them."""


@dataclass(frozen=True)
class Kill:
    """When to kill a process.

    Args:
        rank: which one.
        after_s: since the first step began, if not in a save.
        phase: of a save, in which to do it.
        turn: the how-manieth time that some process comes to that phase, from 1.
    """

    rank: int
    after_s: float = 0.0
    phase: str | None = None
    turn: int = 1


@dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Args:
        codes: exit codes of the ranks, negative for signals.
        where: the phase of a save that a process was killed in; "" outside one, None where none was killed.
    """

    codes: tuple[int, ...]
    where: str | None
    told: str
    seconds: float


@contextmanager
def nursery() -> Iterator[Callable[..., Ended]]:
    """Yield a function that makes an attempt: `attempt(config, kill, patience_s)`."""
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, sys.path))
    process.start()
    theirs.close()

    def attempt(config: RunConfig, kill: Kill | None = None, patience_s: float = 0.2, act: str = "") -> Ended:
        ours.send((config, kill, patience_s, act))
        answer = ours.recv()
        assert isinstance(answer, Ended), answer
        return answer

    try:
        yield attempt
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _serve(pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    import torch

    import runs  # imports all that a run needs, once  # noqa: F401

    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_attempt(*task))
        except Exception:
            pipe.send(traceback.format_exc())


def _attempt(config: RunConfig, kill: Kill | None, patience_s: float, act: str) -> Ended:
    """Fork the ranks, kill one of them if so told, give the other `patience_s`, and kill it too.

    Args:
        act: `module:function`, called with rank and config in each process before it trains; instead, if it returns
            True.
    """
    start_s = time.monotonic()
    folder = Path(config.output_dir).parent
    store, log = str(folder / f"store-{time.monotonic_ns()}"), folder / "log"
    log.write_text("")
    listen, speak = os.pipe()
    pids = []
    for rank in range(_WORLD):
        pid = os.fork()
        if pid == 0:
            os.close(listen)
            os._exit(_rank(config, rank, store, log, kill, speak, act))
        pids.append(pid)
    os.close(speak)
    where = None
    if kill is not None:
        where = _wait_for(listen, kill)
        if where is not None:
            os.kill(pids[kill.rank], signal.SIGKILL)
    codes = [_reap(pid, patience_s if where is not None else 120.0) for pid in pids]
    os.close(listen)
    if where is not None and codes[kill.rank if kill else 0] != -signal.SIGKILL:
        where = None  # it had ended by then
    return Ended(tuple(codes), where, log.read_text(), time.monotonic() - start_s)


def _wait_for(listen: int, kill: Kill) -> str | None:
    """Wait for the moment to kill; return the phase of a save, "" where there is none, None if the run ended before."""
    seen, inside, deadline = 0, "", None
    while True:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([listen], [], [], left_s)[0]:
            return inside
        told = os.read(listen, 1)
        if not told:
            return None
        phase = "begun" if told == b"!" else "" if told == b"." else PHASES[told[0] - ord("a")]
        if phase == "begun":
            deadline = time.monotonic() + kill.after_s if kill.phase is None else None
            continue
        inside = "" if phase == "settled" else phase
        seen += phase == kill.phase
        if seen == kill.turn and phase == kill.phase:
            return inside


def _reap(pid: int, patience_s: float) -> int:
    """Wait for a process, kill it if it does not end in time, and return its exit code."""
    deadline = time.monotonic() + patience_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.005)


def _rank(config: RunConfig, rank: int, store: str, log: Path, kill: Kill | None, speak: int, act: str) -> int:
    out = log.open("a")
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    try:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        import runs
        from longspan.train import loop
        from longspan.train.progress import Progress

        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=_WORLD, timeout=timedelta(seconds=60)
        )
        _hook(rank, kill, speak)
        if act:
            module, _, name = act.partition(":")
            if getattr(importlib.import_module(module), name)(rank, config):
                return 0
        loop.train(config, runs.corpus(), torch.device("cpu"), None if rank else Progress(out, config.max_steps))
        dist.destroy_process_group()
        return 0
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if type(error).__name__ != "TrainingError":
            traceback.print_exc()
        return 1
    finally:
        out.flush()


def _hook(rank: int, kill: Kill | None, speak: int) -> None:
    """Have this process say when a run begins, and when it comes to a phase of a save."""
    from torch.distributed.checkpoint import filesystem

    from longspan.train import checkpoints, loop, writing
    from longspan.train.checkpoints import Checkpoints
    from longspan.train.writing import Writing

    def say(phase: str) -> None:
        os.write(speak, bytes([ord("a") + PHASES.index(phase)]))
        if kill is not None and phase == kill.phase:
            time.sleep(_STAY_S)

    def told(holder: Any, name: str, phase: str, *, after: bool = False) -> None:
        plain = getattr(holder, name)

        def told_first(*args: Any, **kwargs: Any) -> Any:
            if not after:
                say(phase)
            result = plain(*args, **kwargs)
            if after:
                say(phase)
            return result

        setattr(holder, name, told_first)

    for holder, name, phase in (
        (Checkpoints, "_make", "make"),
        (Writing, "_plan", "plan"),
        (writing._Planner, "stage", "copy"),
        (Writing, "_write", "write"),
        (filesystem, "_write_item", "item"),
        (Writing, "complete", "table"),
        (checkpoints, "_commit", "commit"),
        (checkpoints, "_flush", "flush"),
        (Checkpoints, "_thin", "thin"),
    ):
        told(holder, name, phase)
    told(checkpoints, "_commit", "renamed", after=True)
    if rank == 0:
        told(Checkpoints, "_finish", "settled", after=True)
        plain, begun = loop.run_step, False

        def step(*args: Any) -> Any:
            nonlocal begun
            if not begun:
                os.write(speak, b"!")
            begun = True
            return plain(*args)

        loop.run_step = step


def kills(seed: int, span_s: float) -> Iterator[Kill]:
    """Draw kills: two of three in a save, the others at any moment of a run that takes `span_s`."""
    draw = random.Random(seed)
    while True:
        rank, phase = draw.randrange(_WORLD), draw.choice(PHASES[:-1])
        if draw.random() < 1 / 3:
            yield Kill(rank, after_s=draw.uniform(0, span_s))
        else:
            yield Kill(rank, phase=phase, turn=draw.randint(1, {"item": 120, "flush": 8}.get(phase, 2)))

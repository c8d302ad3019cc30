"""One pool of processes for a whole test session: a distributed case costs milliseconds, not the start of Python."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SIZE = 4
"""Processes of the pool; a case runs on the first `world` of them."""

MOST_CASES = 100
"""Then new processes take their place: old ones hold more and more objects, and some cases look at all of them."""

_PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch.fx",
    "transformers",
    "transformers.modeling_utils",
    "longspan.train.loop",
]

RunRanks = Callable[..., list[Any]]


class RankError(AssertionError):
    """A case failed or hung on some rank; the message holds every rank's traceback or stack."""


class Pool:
    """Processes that run cases over gloo, started at the first case and again after a hang.

    The default process group lives as long as the world size stays the same; groups that a case made are destroyed when
    it ends. Memory from `torch.empty` holds NaN.

    Args:
        timeout_s: a case that takes longer is killed.
        grace_s: what the other ranks get to finish once one has failed.
    """

    def __init__(self, timeout_s: float = 120, grace_s: float = 5) -> None:
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self._folder = tempfile.TemporaryDirectory(prefix="longspan-pool-")
        self._workers: list[tuple[Any, Connection]] = []
        self._stores = self._cases = 0
        self._world = 0

    def run(
        self, world: int, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> list:
        """Run `fn(*args, **kwargs)` on ranks 0 to world - 1 and return what each of them returned.

        Args:
            fn: a function of a module, found there by name; with its arguments and result it must be picklable.

        Raises:
            RankError: it raised on some rank, or did not end in time.
        """
        if self._cases >= MOST_CASES:
            self._kill()
        if not self._workers:
            self._start()
        self._cases += 1
        if world != self._world:
            self._world, self._stores = world, self._stores + 1
        store = str(Path(self._folder.name) / f"store{self._stores}")
        task = pickle.dumps((world, store, fn.__module__, fn.__qualname__, args, kwargs))
        for _, pipe in self._workers[:world]:
            pipe.send_bytes(task)
        answers = self._answers(world, timeout_s or self.timeout_s)
        if any(isinstance(answer, _Failure) for answer in answers):
            self._world = 0  # ranks that failed have left the group
            told = "\n".join(f"--- rank {i}\n{a.text}" for i, a in enumerate(answers) if isinstance(a, _Failure))
            raise RankError(f"{fn.__qualname__} failed on {world} ranks\n{told}")
        return answers

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.join(timeout=1)
            process.kill()
        self._workers, self._world, self._cases = [], 0, 0

    def _kill(self) -> None:
        for process, _ in self._workers:
            process.kill()
        self.close()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, theirs, self._log(rank), sys.path), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _answers(self, world: int, timeout_s: float) -> list[Any]:
        """Collect every rank's answer; ranks that do not give one are killed after showing their stacks."""
        answers: dict[int, Any] = {}
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world])}
        deadline = time.monotonic() + timeout_s
        while len(answers) < world:
            ready = wait([p for p in ranks if ranks[p] not in answers], max(0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                answers[ranks[pipe]] = answer = _receive(pipe)  # type: ignore[index,arg-type]
                if isinstance(answer, _Failure):
                    deadline = min(deadline, time.monotonic() + self.grace_s)
        if len(answers) < world or any(isinstance(a, _Failure) and a.dead for a in answers.values()):
            missing = [rank for rank in range(world) if rank not in answers]
            for rank, stack in zip(missing, self._stacks(missing), strict=True):
                answers[rank] = _Failure(f"still running when the others had failed or the time was up:\n{stack}", True)
            self._kill()
        return [answers[rank] for rank in range(world)]

    def _stacks(self, ranks: list[int]) -> list[str]:
        for rank in ranks:
            os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return [Path(self._log(rank)).read_text()[-6000:] for rank in ranks]

    def _log(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"rank{rank}.log")


@contextmanager
def open_pool() -> Iterator[RunRanks]:
    """Yield the `run` of a pool that ends with the block."""
    pool = Pool()
    try:
        yield pool.run
    finally:
        pool.close()


class _Failure:
    def __init__(self, text: str, dead: bool = False) -> None:
        self.text, self.dead = text, dead


def _receive(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return _Failure("the process ended", dead=True)


def _work(rank: int, pipe: Connection, log: str, path: list[str]) -> None:
    """Run cases until the pool closes the pipe."""
    sys.path[:] = path
    out = open(log, "a", buffering=1)  # noqa: SIM115  (lives as long as the process)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=out, all_threads=True)
    import torch

    import without_shm
    from longspan.plan import library

    without_shm.leave_out()
    library.OWN_FILE = Path(os.devnull)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # with it goes torch.utils.deterministic.fill_uninitialized_memory
    group = None
    while True:
        try:
            world, store, module, name, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            os.truncate(log, 0)
            group = _join(rank, world, store, group)
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            torch.manual_seed(0)
            answer = pickle.dumps(function(*args, **kwargs))
            _forget_groups()
        except BaseException:
            answer = pickle.dumps(_Failure(traceback.format_exc()))
            _leave()
            group = None
        pipe.send_bytes(answer)


def _join(rank: int, world: int, store: str, group: tuple[int, str] | None) -> tuple[int, str]:
    """Make the default process group the one of this case."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    if group != (world, store):
        _leave()
        dist.init_process_group(
            "gloo", store=FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=100)
        )
    return world, store


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _forget_groups() -> None:
    """Destroy all groups but the default one: their sockets and threads would add up over a session."""
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)

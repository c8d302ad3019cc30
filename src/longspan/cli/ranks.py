"""Start processes on this host and bring home their result, or the first error; or be one of a launcher's."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from longspan.cli import failures
from longspan.cli.stopping import Leaving
from longspan.errors import ConfigError, TopologyError, TrainingError
from longspan.versions import check_versions

_GRACE_S = 5.0
_TIMEOUT = timedelta(minutes=10)


class Job(Protocol):
    """What the processes have to do; it is pickled."""

    @property
    def processes(self) -> int:
        """How many there are."""
        ...

    @property
    def device(self) -> str:
        """`cpu`, `cuda` or `auto`."""
        ...

    @property
    def grouped(self) -> bool:
        """Whether one process alone needs a process group too."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """What is imported once, in the process that the others are forked from."""
        ...

    def run(self, device: Any) -> dict[str, Any] | None:
        """Do it, in each process; return the result on the first."""
        ...


def start(job: Job, limit_s: float | None = None) -> dict[str, Any]:
    """Run a job in processes of its own.

    The processes are forks of one that has imported everything, where the system can do that; with GPUs they start
    afresh, as a fork of a process that has looked at CUDA cannot use it.

    Args:
        limit_s: processes that take longer are ended.

    Raises:
        LongspanError: the first error of a process, of the same kind; TrainingError for the limit.
    """
    check_versions()  # here, as all that follows imports integrations where nobody hears its errors
    forks = "forkserver" in mp.get_all_start_methods() and not has_gpu()
    context: Any = mp.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["longspan.cli", *job.modules])  # the first keeps other libraries quiet
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder, Leaving() as leaving:
        ranks = [
            context.Process(target=_process, args=(job, rank, folder), daemon=True) for rank in range(job.processes)
        ]
        try:
            with leaving.held():
                for rank in ranks:
                    rank.start()
            in_time = _wait(ranks, limit_s)
        finally:
            _end(ranks)
        if not in_time:
            raise TrainingError(f"Stopped at the limit: its processes were ended after {limit_s:.0f} s.")
        return _result(Path(folder), [rank.exitcode for rank in ranks])


def join(job: Job) -> dict[str, Any] | None:
    """Do a job as one of the processes that a launcher started.

    Raises:
        TopologyError: they are not as many as the job needs.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if world_size != job.processes:
        raise TopologyError(
            f"The launcher started {world_size} processes, but {job.processes} were asked for (--sp or --nproc)."
        )
    device = choose_device(job.device, int(os.environ["LOCAL_RANK"]), local_size)
    with _group(device, world_size, rank, "env://"):
        return job.run(device)


def check_degrees(sp: int, ulysses: int | None, ring: int | None) -> None:
    """Refuse degrees that do not make a number of processes.

    Raises:
        TopologyError: with the numbers.
    """
    for name, count in (("--sp", sp), ("--ulysses", ulysses), ("--ring", ring)):
        if count is not None and count < 1:
            raise TopologyError(f"{name} must be at least 1, got {count}.")
    made = (ulysses or 1) * (ring or 1)
    both = ulysses is not None and ring is not None
    if sp % made or (both and made != sp):
        raise TopologyError(
            f"--ulysses x --ring must make --sp, got {ulysses} and {ring} for {sp}: give one of them, a divisor, or "
            "neither."
        )


def check_device(name: str) -> None:
    """Refuse a device that is none of `cpu`, `cuda` and `auto`.

    Raises:
        ConfigError: it is.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, got {name!r}.")


def has_gpu() -> bool:
    """Whether this host has a GPU that torch can use."""
    import torch

    return torch.cuda.device_count() > 0


def _wait(ranks: Sequence[BaseProcess], limit_s: float | None = None) -> bool:
    """Return when all processes have ended, or one of them badly; False if the time is up before."""
    running = {rank.sentinel: rank for rank in ranks}
    until = None if limit_s is None else time.monotonic() + limit_s
    while running:
        ended = wait(list(running), None if until is None else max(0.0, until - time.monotonic()))
        if not ended:
            return False
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[call-overload,arg-type]
            rank.join()
            if rank.exitcode:
                return True
    return True


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End what still runs."""
    started = [rank for rank in ranks if rank.pid is not None]
    for rank in started:
        if rank.is_alive():
            rank.terminate()
    deadline = time.monotonic() + _GRACE_S
    for rank in started:
        rank.join(max(0.0, deadline - time.monotonic()))
        if rank.is_alive():
            rank.kill()
            rank.join()


def _result(folder: Path, codes: Sequence[int | None]) -> dict[str, Any]:
    error = failures.first(folder)
    if error is not None:
        raise error
    if any(codes):
        rank = next(i for i, code in enumerate(codes) if code)
        raise TrainingError(f"Process {rank} ended with exit code {codes[rank]} and said nothing; was it killed?")
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def _process(job: Job, rank: int, folder: str) -> None:
    os.dup2(2, 1)  # stdout belongs to the result
    os.environ["LOCAL_RANK"] = str(rank)  # as launchers do; DeepSpeed asks for it
    try:
        result = _done(job, rank, folder)
        if result is not None:
            (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    except Exception as error:
        failures.leave(Path(folder), rank, error)


def _done(job: Job, rank: int, folder: str) -> dict[str, Any] | None:
    import logging

    import torch

    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # what goes wrong is raised
    device = choose_device(job.device, rank, job.processes)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if job.processes == 1 and not job.grouped:
        return job.run(device)
    with _group(device, job.processes, rank, f"file://{folder}/store"):
        return job.run(device)


@contextmanager
def _group(device: Any, size: int, rank: int, store: str) -> Iterator[None]:
    """Be part of the default process group."""
    import torch.distributed as dist

    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=store,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    yield
    dist.destroy_process_group()  # not after an error: it would wait for ranks that no longer come


def choose_device(asked: str, rank: int, processes: int) -> Any:
    """Return a process's device; `auto` is a GPU each if there are as many.

    Raises:
        TopologyError: too few GPUs.
    """
    import torch

    count = torch.cuda.device_count()
    if asked == "cuda" and count < processes:
        raise TopologyError(
            f"{processes} processes need {processes} GPUs, found {count}: start fewer, or take the CPU (--device cpu)."
        )
    if asked == "cpu" or count < processes:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)

"""Start the processes of a check on this host and bring home its result, or the first error."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from longspan.check.settings import Settings
from longspan.cli import failures
from longspan.errors import ConfigError, TopologyError, TrainingError

_PRELOADED = ["longspan.check.run", "longspan.integrations.models"]
_GRACE_S = 5.0
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Job:
    """What a process needs: settings, and `cpu`, `cuda` or `auto`."""

    settings: Settings
    device: str


def start(job: Job) -> dict[str, Any]:
    """Run a check on as many processes as share a sequence.

    The processes are forks of one that has imported everything, where the system can do that; with GPUs they start
    afresh, as a fork of a process that has looked at CUDA cannot use it.

    Raises:
        LongspanError: the first error of a process, of the same kind.
    """
    forks = "forkserver" in mp.get_all_start_methods() and not has_gpu()
    context: Any = mp.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        ranks = [
            context.Process(target=_process, args=(job, rank, folder), daemon=True) for rank in range(job.settings.sp)
        ]
        try:
            for rank in ranks:
                rank.start()
            _wait(ranks)
        finally:
            _end(ranks)
        return _result(Path(folder), [rank.exitcode for rank in ranks])


def has_gpu() -> bool:
    """Whether this host has a GPU that torch can use."""
    import torch

    return torch.cuda.device_count() > 0


def _wait(ranks: Sequence[BaseProcess]) -> None:
    """Return when all processes have ended, or one of them badly."""
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in wait(list(running)):
            rank = running.pop(sentinel)  # type: ignore[call-overload,arg-type]
            rank.join()
            if rank.exitcode:
                return


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
    try:
        result = _checked(job, rank, folder)
        if result is not None:
            (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    except Exception as error:
        failures.leave(Path(folder), rank, error)


def _checked(job: Job, rank: int, folder: str) -> dict[str, Any] | None:
    import logging

    import torch
    import torch.distributed as dist

    from longspan.check.run import run_check

    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.CRITICAL)  # what goes wrong is raised
    settings = job.settings
    device = _device(job.device, rank, settings.sp)
    config = _config(settings.model)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if settings.sp > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=settings.sp,
            timeout=_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
    result = run_check(config, settings, device)
    if settings.sp > 1:
        dist.destroy_process_group()
    return result


def _config(name: str) -> Any:
    """Read the model's configuration.

    Raises:
        ConfigError: there is none, or no sense in it.
    """
    from longspan.config import ModelConfig
    from longspan.integrations.models import load_model_config

    try:
        return load_model_config(ModelConfig(name=name, init="random"))
    except ConfigError as error:
        raise ConfigError(f"--model: {str(error).removeprefix('model.name: ')}") from None
    except Exception as error:  # what is wrong with a file shows in many ways
        raise ConfigError(f"--model: cannot read {name!r} ({type(error).__name__}: {error})") from None


def _device(asked: str, rank: int, processes: int) -> Any:
    import torch

    count = torch.cuda.device_count()
    if asked == "cuda" and count < processes:
        raise TopologyError(
            f"--sp {processes} needs {processes} GPUs, found {count}: take --device cpu or a smaller --sp."
        )
    if asked == "cpu" or count < processes:
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)

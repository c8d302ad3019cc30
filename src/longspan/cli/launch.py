"""Start a run's processes, or join those that a launcher started, and bring their errors home once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from longspan.agreement import Agreement
from longspan.cli import failures
from longspan.cli.rendezvous import run_name, shared_store
from longspan.cli.stopping import deaf_forkserver, hear, passing_on, was_told
from longspan.config import RunConfig
from longspan.engines import build_engine
from longspan.errors import ConfigError, LongspanError, TrainingError
from longspan.once import is_first
from longspan.report import conclude, end_of, read_facts
from longspan.train.checkpoint import check_output
from longspan.train.data import Corpus
from longspan.train.loop import train
from longspan.train.preflight import preflight
from longspan.train.progress import Progress
from longspan.train.resume import goes_on
from longspan.train.watchdog import patience, report_file

_PRELOADED = ["longspan.cli.launch"]
"""What is imported once, in the process that the others are forked from."""

_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Job:
    """What a started process needs: settings, data, where to leave its error, and where rank 0 shows progress."""

    config: str
    corpus: str
    errors: str
    to_stderr: bool
    data: str


def default_processes(config: RunConfig) -> int:
    """Return one process per GPU; without a GPU, as many as share a sequence."""
    return torch.cuda.device_count() or config.sequence_parallel_size


def start(config: RunConfig, processes: int, stream: TextIO) -> int:
    """Check a run, start its processes on this host and wait for them; return the last step.

    Args:
        stream: where progress goes, stdout or stderr.

    Raises:
        LongspanError: what the check found, or the first error of a process.
    """
    check_output(Path(config.output_dir), config.overwrite or config.resume)
    corpus, report = preflight(config, processes)
    print(f"data: {report}", file=stream, flush=True)
    if processes == 1:
        return _train_alone(config, corpus, stream, str(report))
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        path = str(Path(folder) / "corpus.safetensors")
        corpus.save(path)
        job = Job(config.model_dump_json(), path, folder, stream is sys.stderr, str(report))
        with _told(config):
            stopped = _launch(job, processes)
    return config.max_steps if stopped is None else stopped


def join(config: RunConfig, to_stderr: bool) -> int | None:
    """Run as one of a launcher's processes; return the last step on the first of them, None on the others.

    An error in the settings or the data is the same on a whole host, but not on all hosts: the first process of each
    host raises it; the others exit silently. After an error in the run a process ends at once: leaving in order would
    wait for the others. A run that torchrun starts again goes on from its last checkpoint.
    """
    rank, speaks = int(os.environ["RANK"]), os.environ["LOCAL_RANK"] == "0"
    try:
        corpus, report = preflight(config, int(os.environ["WORLD_SIZE"]))
    except LongspanError:
        if speaks:
            raise
        time.sleep(_PATIENCE_S)  # launchers end all processes with the first; let that be the one that speaks
        sys.exit(2)
    stream = sys.stderr if to_stderr else sys.stdout
    if rank == 0:
        print(f"data: {report}", file=stream, flush=True)
    try:
        last = _train_as_rank(config, corpus, stream, str(report))
    except Exception as error:
        if isinstance(error, ConfigError) and not speaks:
            time.sleep(_PATIENCE_S)
        failures.end(error)
    return last if rank == 0 else None


def _launch(job: Job, processes: int) -> int | None:
    """Start processes and wait for them; return the step that they were stopped after, None if they were not."""
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="longspan",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn" if torch.cuda.device_count() else "forkserver",
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
    )
    multiprocessing.set_forkserver_preload(_PRELOADED)
    if launch.start_method == "forkserver":
        deaf_forkserver()
    logging.disable(logging.CRITICAL)  # the launcher's account of a failure; ours is printed instead
    try:
        with passing_on(Path(job.errors)):
            elastic_launch(launch, _process)(job)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode != -signal.SIGTERM or not was_told(Path(job.errors)):
            raise failures.first(Path(job.errors)) or _silent(job, rank, failure.exitcode) from None
        if not _stopped(job).exists():  # else it was told again when it had saved
            said = "Stopped by SIGTERM before there was a step to save; its processes have ended."
            raise TrainingError(said) from None
    except SignalException as stopped:
        raise TrainingError(f"Stopped by {stopped.sigval.name}; its processes have ended.") from None
    finally:
        logging.disable(logging.NOTSET)
    return int(_stopped(job).read_text(encoding="ascii")) if _stopped(job).exists() else None


@contextmanager
def _told(config: RunConfig) -> Iterator[None]:
    """Have the page of a run say the first error of its processes, which the first process may not know.

    Only if the run had begun: what is in the folder may be an earlier one's.
    """
    folder = Path(config.output_dir)
    before = _began(folder)
    try:
        yield
    except LongspanError as error:
        facts = read_facts(folder) if _began(folder) != before else None
        if facts is not None:
            conclude(folder, facts, end_of(error, None))
        raise


def _began(folder: Path) -> list[str]:
    """Return when the run in a folder began and went on; nothing where no run can be read."""
    try:
        facts = read_facts(folder)
    except ConfigError:
        return []
    return [] if facts is None else [facts.run, *facts.starts]


def _silent(job: Job, rank: int, code: int) -> TrainingError:
    """Return the error of a process that left none: its watchdog ended it, or somebody else."""
    report = report_file(Path(RunConfig.model_validate_json(job.config).output_dir), rank)
    if report.exists():
        return TrainingError(f"{report.read_text(encoding='utf-8').splitlines()[0]} Its stacks are in {report}.")
    return TrainingError(f"Process {rank} ended with exit code {code} and said nothing; was it killed?")


def _stopped(job: Job) -> Path:
    """Return where the first process notes after which step it stopped, once that is saved."""
    return Path(job.errors) / "stopped"


def _process(job: Job) -> None:
    hear(Path(job.errors))
    try:
        config = RunConfig.model_validate_json(job.config)
        stream = sys.stderr if job.to_stderr else sys.stdout
        last = _train_as_rank(config, Corpus.load(job.corpus), stream, job.data)
        if last < config.max_steps and os.environ["RANK"] == "0":
            _stopped(job).write_text(str(last), encoding="ascii")
    except Exception as error:
        failures.leave(Path(job.errors), int(os.environ["RANK"]), error)


def _train_as_rank(config: RunConfig, corpus: Corpus, stream: TextIO, data: str) -> int:
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_size > torch.cuda.device_count():
            raise ConfigError(
                f"{local_size} processes on this host, which see {torch.cuda.device_count()} GPUs: start fewer. Under "
                "srun let each task see all GPUs of its node (--gpus-per-node or --gpu-bind=none, not --gpus-per-task)."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    with _process_group(device, config):
        config, run = _begin_or_go_on(config)
        return train(config, corpus, device, _progress(config, stream) if rank == 0 else None, data, run)


def _begin_or_go_on(config: RunConfig) -> tuple[RunConfig, str]:
    """Return the settings of this start, and the name of its run, as the first process decides. Collective.

    Each host counts the starts of its own processes, so it takes all of them to know whether there was one before.

    Raises:
        ConfigError: the output folder may not be used, on all processes.
    """
    agree = Agreement(f"look into {config.output_dir}", "See that all processes can read it.")
    restarts = max(agree(lambda: int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))

    def decide() -> tuple[str, bool, str | None]:
        run, new = run_name(patience(config.faults.timeout_minutes * 60))
        try:
            return run, goes_on(config, run, lost=new and restarts > 0), None
        except ConfigError as error:
            return run, False, str(error)

    run, resume, problem = agree(lambda: decide() if is_first() else ("", False, None))[0]
    if problem is not None:
        raise ConfigError(problem)
    return config.model_copy(update={"resume": resume, "overwrite": config.overwrite and not resume}), run


def _train_alone(config: RunConfig, corpus: Corpus, stream: TextIO, data: str) -> int:
    """Train in this process, in a group of its own if the engine needs one."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    compute_dtype = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    if build_engine(config.engine, 1, compute_dtype).name == "single":
        return train(config, corpus, device, _progress(config, stream), data)
    os.environ.setdefault("LOCAL_RANK", "0")  # as launchers do; DeepSpeed asks for it
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:  # a group of one talks to nobody, so its sockets need not face the network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    with (
        tempfile.TemporaryDirectory(prefix="longspan-") as folder,
        _process_group(device, config, init_method=f"file://{folder}/store", rank=0, world_size=1),
    ):
        return train(config, corpus, device, _progress(config, stream), data)


@contextmanager
def _process_group(device: torch.device, config: RunConfig, **rendezvous: Any) -> Iterator[None]:
    """Be part of the default process group; without a rendezvous, of the one that the environment names."""
    on_gpu, timeout = device.type == "cuda", patience(config.faults.timeout_minutes * 60)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        device_id=device if on_gpu else None,
        timeout=timeout,
        **(rendezvous or shared_store(timeout)),
    )
    ended = False
    try:
        yield
        ended = True
    finally:
        if ended or dist.get_world_size() == 1:  # after an error it would wait for processes that no longer come
            dist.destroy_process_group()


def _progress(config: RunConfig, stream: TextIO) -> Progress:
    return Progress(stream, config.max_steps, config.logging.every)

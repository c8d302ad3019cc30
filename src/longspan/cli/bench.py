"""`longspan bench`: measure step times, memory, exchanges and attention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from longspan.bench.settings import AUTO, Asked, Setting, Work, settings_of
from longspan.cli.allocator import choose_allocator
from longspan.cli.bench_flags import (
    AllFlags,
    AttentionFlags,
    ExchangeFlags,
    FitFlags,
    Flags,
    StepFlags,
    TableFlags,
    WorkFlags,
)
from longspan.cli.bench_jobs import ExchangeJob, WorkJob
from longspan.cli.flags import amount, lora, size, with_flags
from longspan.cli.launchers import launched
from longspan.cli.ranks import has_gpu, join, start
from longspan.cli.stopping import Leaving
from longspan.errors import ConfigError, LongspanError, TrainingError

bench = typer.Typer(
    name="bench",
    help="Measure, each configuration only once it is seen to equal the plain model; predictions beside measurements.",
    no_args_is_help=True,
)

_PEERS = Path("benchmarks/peers")
_GRACE_S = 10.0


@dataclass
class Run:
    """One command: where results go and when to stop."""

    flags: Flags
    folder: str

    def __post_init__(self) -> None:
        self.started = time.time()
        self.until = None if self.flags.limit_s is None else self.started + self.flags.limit_s

    @property
    def left_s(self) -> float | None:
        """Seconds until the limit."""
        return None if self.until is None else max(0.0, self.until - time.time())

    def target(self, name: str) -> Any:
        """Return where a file of this command goes; processes that follow each other add to one file."""
        from longspan.bench.results import Target

        pointer = None if launched() else str(Path(self.folder) / name)
        command = " ".join(["longspan", *sys.argv[1:]])
        return Target(self.flags.out, self.flags.commit or _commit(), command, pointer)

    def do(self, job: Any) -> dict[str, Any] | None:
        """Run a job in processes of its own, or as one of a launcher's; the content of its file, on the first process.

        Processes end themselves before the limit; those that do not are ended soon after it.
        """
        if launched():
            return join(job)
        return start(job, None if self.left_s is None else self.left_s + _GRACE_S)


@bench.command()
@with_flags(StepFlags)
def step(**flags: Any) -> None:
    """Time optimizer steps of full fine-tuning, one row of random tokens each.

    Exit code 1: a configuration is not exact, or a measurement failed; what was measured is in the file.
    """
    given = StepFlags(**flags)
    _finish(given, lambda run: _steps(given, run))


@bench.command()
@with_flags(FitFlags)
def fit(**flags: Any) -> None:
    """Prove that rows of a length fit: a whole step, in which attention runs in a few calls only."""
    given = FitFlags(**flags)
    _finish(given, lambda run: _fits(given, run))


@bench.command()
@with_flags(ExchangeFlags)
def exchange(**flags: Any) -> None:
    """Time exchanges of heads between GPUs, compared with their definition first."""
    given = ExchangeFlags(**flags)
    _finish(given, lambda run: _exchange(given, run))


@bench.command()
@with_flags(AttentionFlags)
def attention(**flags: Any) -> None:
    """Time attention over all GPUs against the same kernel on one GPU's heads, dense and packed."""
    given = AttentionFlags(**flags)
    _finish(given, lambda run: _attention(given, run))


@bench.command(name="all")
@with_flags(AllFlags)
def every(**flags: Any) -> None:
    """Run exchange, attention, step and fit after each other; one that cannot be done leaves the others."""
    given = AllFlags(**flags)
    if launched():
        raise ConfigError("bench all starts processes of its own; leave the launcher out.")
    _finish(given, lambda run: _every(given, run))


@bench.command()
@with_flags(TableFlags)
def table(**flags: Any) -> None:
    """Write the tables of a page anew from result files."""
    from longspan.bench.table import rendered

    given = TableFlags(**flags)
    page = Path(given.page)
    if not page.is_file():
        raise ConfigError(f"There is no page {given.page}.")
    page.write_text(rendered(page.read_text(encoding="utf-8"), Path(given.results)), encoding="utf-8")
    print(given.page)


def _finish(flags: Flags, measure: Callable[[Run], list[dict[str, Any]]]) -> None:
    """Measure, print what came of it, and exit with 1 if something of it is wrong."""
    choose_allocator()
    from longspan.bench.results import DONE, STOPPED
    from longspan.bench.table import rows_table

    with tempfile.TemporaryDirectory(prefix="longspan-") as folder, Leaving():
        contents = measure(Run(flags, folder))
    if not contents:  # a process of a launcher's, not the first
        return
    if flags.json_:
        print(json.dumps(contents if len(contents) != 1 else contents[0]))
    else:
        for content in contents:
            print(rows_table(content))
            for name, value in content["figures"].items():
                print(f"{name}: {value}")
            print(content["path"])
    ours = [row for content in contents for row in content["rows"] if row.get("system", "longspan") == "longspan"]
    if not all(row["state"] in (DONE, STOPPED) for row in ours):
        raise typer.Exit(1)


def _every(flags: AllFlags, run: Run) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {name: getattr(flags, name) for name in Flags.__dataclass_fields__}
    shared["heads"] = flags.heads
    work: dict[str, Any] = {name: getattr(flags, name) for name in WorkFlags.__dataclass_fields__}
    work["seq_len"] = flags.fit_seq_len or ("3M" if _processes(flags) > 1 else "1200K")
    exchange, fits = ExchangeFlags(**shared, payload_mib=flags.payload_mib), FitFlags(**work)
    attention = AttentionFlags(**shared, kernel=flags.kernel, seq_len=flags.attention_seq_len)
    parts: list[Callable[[], list[dict[str, Any]]]] = [lambda: _steps(flags, run), lambda: _fits(fits, run)]
    if _processes(flags) > 1:
        parts = [lambda: _exchange(exchange, run), lambda: _attention(attention, run), *parts]
    found: list[dict[str, Any]] = []
    errors: list[LongspanError] = []
    for part in parts:
        try:
            found += part()
        except LongspanError as error:
            print(f"Error: {error}", file=sys.stderr, flush=True)
            errors.append(error)
    if errors and not found:
        raise errors[0]
    return found


def _steps(flags: StepFlags, run: Run) -> list[dict[str, Any]]:
    asked = Asked(_work(flags), _settings(flags), flags.steps, flags.profile)
    if flags.profile and not has_gpu():
        raise ConfigError("--profile looks at what a GPU does, and there is none.")
    if flags.peers and launched():
        raise ConfigError("--peers starts processes of its own; leave the launcher out.")
    if flags.peers and not _PEERS.is_dir():
        raise ConfigError(f"--peers runs the scripts in {_PEERS}: start in a checkout of longspan.")
    found = _measured(asked, flags.device, run, "step")
    if flags.peers and found:
        _add_peers(asked, flags, run, found[0])
    return found


def _fits(flags: FitFlags, run: Run) -> list[dict[str, Any]]:
    asked = Asked(_work(flags), _settings(flags), fit=True)
    if not flags.search:
        return _measured(asked, flags.device, run, "fit")
    if launched() or len(asked.settings) != 1:
        raise ConfigError("--search takes one --memory and one --seq-len to begin with, and no launcher.")
    from longspan.bench.fit import search

    memory = asked.settings[0].memory
    found: list[dict[str, Any]] = []

    def fits(tokens: int) -> bool | None:
        if run.left_s is not None and run.left_s <= _GRACE_S:
            return None
        one = Asked(asked.work, (Setting(memory, tokens),), fit=True)
        found[:] = _measured(one, flags.device, run, "fit")
        state = found[0]["rows"][-1]["state"]
        return None if state.startswith("stopped") else state == "done"

    search(fits, asked.settings[0].tokens)
    return found


def _exchange(flags: ExchangeFlags, run: Run) -> list[dict[str, Any]]:
    from longspan.bench.exchange import Exchanging

    asked = Exchanging(_several(flags), flags.chosen_heads, payload_bytes=flags.payload_mib << 20, times=flags.times)
    found = run.do(ExchangeJob(asked, False, run.target("exchange"), run.until, flags.device))
    return [found] if found else []


def _attention(flags: AttentionFlags, run: Run) -> list[dict[str, Any]]:
    from longspan.bench.exchange import Exchanging

    tokens = size("--seq-len", flags.seq_len)
    asked = Exchanging(_several(flags), flags.chosen_heads, tokens=tokens, kernel=flags.kernel, times=flags.times)
    found = run.do(ExchangeJob(asked, True, run.target("attention"), run.until, flags.device))
    return [found] if found else []


def _measured(asked: Asked, device: str, run: Run, name: str) -> list[dict[str, Any]]:
    """Measure all settings; where one brings its processes down for lack of memory, go on with the rest in new ones."""
    target = run.target(name)
    while True:
        try:
            found = run.do(WorkJob(asked, target, run.until, device))
            return [found] if found else []
        except TrainingError as error:
            content = _after_failure(target, error)
            print(error, file=sys.stderr)
            told = {(row["memory"], row["tokens"]) for row in content["rows"]}
            rest = tuple(s for s in asked.settings if (s.memory, s.tokens) not in told)
            if not rest or (run.left_s is not None and run.left_s <= _GRACE_S):
                return [content]
            asked = replace(asked, settings=rest)


def _after_failure(target: Any, error: TrainingError) -> dict[str, Any]:
    """Write down in the file what became of the row that was being measured, and return the file's content.

    Raises:
        TrainingError: the error itself, if it does not come from a row that did not fit or took too long.
    """
    from longspan.bench.results import OUT_OF_MEMORY, STOPPED, Results

    text = str(error)
    fates = {OUT_OF_MEMORY: OUT_OF_MEMORY, "was it killed": "killed", "Stopped at the limit": STOPPED}
    fate = next((fate for mark, fate in fates.items() if mark in text), None)
    if target.pointer is None or not Path(target.pointer).exists():
        raise error
    results = Results.load(Path(Path(target.pointer).read_text(encoding="utf-8")))
    if results.end_running(fate or f"failed: {text.splitlines()[-1]}") is None or fate is None:
        raise error
    return {**results.content, "path": str(results.path)}


def _add_peers(asked: Asked, flags: StepFlags, run: Run, content: dict[str, Any]) -> None:
    """Measure the others, one after the other, into the same file."""
    from longspan.bench.peers import PEERS, run_peer
    from longspan.bench.results import Results

    results = Results.load(Path(content["path"]))
    for peer in PEERS:
        options = ["--liger"] if flags.liger and peer.name == "ringmaster" else []
        for row in run_peer(peer, _PEERS, asked, run.left_s, options):
            print(f"PEER {row}", file=sys.stderr, flush=True)
            results.rows.append(row)
        results.save()
    content |= results.content


def _work(flags: WorkFlags) -> Work:
    return Work(
        flags.model, _processes(flags), flags.layers, flags.ulysses, flags.ring, flags.kernel, flags.engine,
        flags.optimizer, _host_bytes(flags.host_memory), flags.seed,
        lora(flags.lora_rank),
    )  # fmt: skip


def _settings(flags: WorkFlags) -> tuple[Setting, ...]:
    return settings_of(flags.memory or [AUTO], [size("--seq-len", text) for text in flags.seq_len.split(",")])


def _processes(flags: Flags) -> int:
    """Return the number of processes: a launcher's, or that of the GPUs, unless it was given."""
    if launched():
        return int(os.environ["WORLD_SIZE"])
    if flags.sp is not None:
        return flags.sp
    import torch

    return max(1, torch.cuda.device_count())


def _several(flags: Flags) -> int:
    count = _processes(flags)
    if count < 2:
        raise ConfigError(f"There is nothing to exchange between {count} process: take --sp 2 or more.")
    return count


def _host_bytes(text: str | None) -> int:
    if text is not None:
        return amount("--host-memory", text)
    from longspan.optim.memory import available_bytes

    return available_bytes()


def _commit() -> str:
    """Return the commit of the checkout that this is run in; empty outside of one."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()

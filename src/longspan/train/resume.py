"""Stop a run so that it can go on, and go on with it."""

from __future__ import annotations

import hashlib
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from longspan.config import RunConfig
from longspan.errors import ConfigError
from longspan.report import read_facts
from longspan.train.checkpoint import check_output, holds_something
from longspan.train.checkpoints import Saved
from longspan.train.data import Corpus


class StopRequest:
    """Notices SIGTERM, with which schedulers announce the end, so that the step at hand can be finished and saved.

    Outside the main thread, which alone hears signals, SIGTERM does what it did.
    """

    def __init__(self) -> None:
        self._serves = threading.current_thread() is threading.main_thread()
        self._before: Any = None
        self.came = False

    def __enter__(self) -> Self:
        if self._serves:
            self._before = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._serves:
            signal.signal(signal.SIGTERM, self._before)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.came = True


def goes_on(config: RunConfig, run: str, lost: bool) -> bool:
    """Return whether a start goes on with what is in its output folder: as told, or as its own run has left it.

    Only the first process may decide it, once no process of an earlier start writes any more.

    Args:
        run: the name of the run that this is a start of, see `Facts.run`.
        lost: that name is new although this is not the first start, so whose the folder is cannot be told.

    Raises:
        ConfigError: the folder holds something that it neither goes on with nor may remove.
    """
    folder = Path(config.output_dir)
    if config.resume or _run_in(folder) == run:
        return True
    if lost and holds_something(folder):
        raise ConfigError(
            f"This run has been started before, but torchrun's store for all of its starts is gone or switched off, so "
            f"{folder} may be this run's or an older one's. Start it with --resume to go on with what is there, or "
            "anew with --overwrite."
        )
    check_output(folder, config.overwrite)
    return False


def _run_in(folder: Path) -> str | None:
    """Return the name of the run in a folder; None where none can be read."""
    try:
        facts = read_facts(folder)
    except ConfigError:
        return None
    return None if facts is None else facts.run


def identity(config: RunConfig, corpus: Corpus, engine: str, processes: int) -> dict[str, Any]:
    """Return what must be alike for a run to go on from a checkpoint.

    Engines of torch go on from each other's checkpoints on any number of processes; DeepSpeed's from their own.

    Cost: a hash of all tokens.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (corpus.starts, corpus.tokens, corpus.labels):
        if tensor is not None:
            digest.update(tensor.contiguous().numpy().data)
    zero = engine.startswith("zero-")
    sections = {f"model.{name}": value for name, value in config.model.model_dump(mode="json").items()}
    sections |= {f"adapter.{name}": value for name, value in config.adapter.model_dump(mode="json").items()}
    return sections | {
        "optimizer.kind": config.optimizer.kind,
        "sequence_length": config.sequence_length,
        "data.packing": config.data.packing,
        "data.packing_strategy": config.data.packing_strategy,
        "data.shuffle": config.data.shuffle,
        "seed": config.seed,
        "the data": digest.hexdigest(),
        "engine": engine if zero else "of torch",
        "the number of processes": processes if zero else "any",
    }


def check_identity(saved: Saved, now: dict[str, Any]) -> None:
    """Refuse to go on with another run than the one that was saved.

    Raises:
        ConfigError: names what differs.
    """
    then = saved.about["identity"]
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            raise ConfigError(
                f"Checkpoint {saved.folder} was written where {name} was {then.get(name)}, here it is "
                f"{now.get(name)}: set it back, or begin anew in another output_dir."
            )

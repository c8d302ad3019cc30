"""Write the trained model where a run's output goes: all of it or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryFile

from torch import Tensor, nn

from longspan.agreement import Agreement
from longspan.engines import protocol
from longspan.errors import ConfigError, TrainingError
from longspan.once import is_first
from longspan.report.facts import METRICS, REPORT, RUN
from longspan.train.loggers import TENSORBOARD
from longspan.train.watchdog import REPORTS

ACCOUNT = (RUN, REPORT, TENSORBOARD, REPORTS)
"""What tells of a run, as patterns; a folder that holds nothing else has nothing to lose."""

MODEL = "model"
CHECKPOINTS = "checkpoints"


def check_output(output_dir: Path, overwrite: bool, name: str = "output_dir") -> None:
    """Refuse a folder that cannot be written or that holds something; create nothing.

    Args:
        name: what the user calls it.

    Raises:
        ConfigError: with the way out.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"{name} {output_dir} is a file; name a folder.")
    if not overwrite and holds_something(output_dir):
        also = ", or pass --overwrite" if name == "output_dir" else ""
        raise ConfigError(f"{name} {output_dir} is not empty. Name another folder{also}.")
    nearest = next(folder for folder in (output_dir, *output_dir.absolute().parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ConfigError(f"{name} {output_dir} cannot be created: {nearest} is not a folder that can be written.")


def try_output(output_dir: Path) -> None:
    """Make a run's output folder and write to it, since permissions alone do not tell.

    Raises:
        ConfigError: with what the system said.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=output_dir) as file:
            file.write(b"longspan")
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"output_dir {output_dir} cannot be written: {error.strerror or error}. Name another folder."
        ) from None


def holds_something(output_dir: Path) -> bool:
    """Whether a folder holds more than what tells of a run."""
    names = [path.name for path in output_dir.iterdir()] if output_dir.is_dir() else []
    return not all(any(fnmatch(name, pattern) for pattern in ACCOUNT) for name in names)


def clear_output(output_dir: Path) -> None:
    """Remove what an earlier run left: its metrics and what tells of them, its model, its checkpoints, nothing else.

    Raises:
        OSError: something stays, which another start might go on from.
    """
    for path in (output_dir / METRICS, output_dir / RUN, output_dir / REPORT, *output_dir.glob(REPORTS)):
        path.unlink(missing_ok=True)
    for folder in (output_dir / MODEL, output_dir / CHECKPOINTS, output_dir / TENSORBOARD):
        if folder.exists():
            shutil.rmtree(folder)


def full_state(
    model: nn.Module, keep: bool, whole: Callable[[Tensor], Tensor] = protocol.whole, *, trained: bool = False
) -> dict[str, Tensor]:
    """Gather a model's whole state on the CPU, or what is trained of it.

    Args:
        keep: whether this rank wants it; the others take part and return nothing.
        whole: gathers a tensor, as the engine that holds it does.
        trained: leave out what is frozen, and buffers.

    Cost: one all-gather per sharded parameter; only one parameter at a time is whole on the device.
    """
    state: dict[str, Tensor] = {}
    gathered: dict[int, Tensor | None] = {}  # tied names share a tensor, gathered once on every rank
    held = model.named_parameters(remove_duplicate=False) if trained else model.state_dict(keep_vars=True).items()
    for name, value in held:
        if trained and not value.requires_grad:
            continue
        if id(value) not in gathered:
            gathered_value = whole(value)
            gathered[id(value)] = gathered_value.cpu() if keep else None
        kept = gathered[id(value)]
        if kept is not None:
            state[name] = kept
    return state


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new folder and move it into place, so that a reader never sees half of one.

    Raises:
        TrainingError: the disk refused; nothing is left behind.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        raise TrainingError(f"Cannot write {folder}: {error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_model(
    model: nn.Module,
    folder: Path,
    write: Callable[[Path, dict[str, Tensor]], None],
    whole: Callable[[Tensor], Tensor] = protocol.whole,
    *,
    trained: bool = False,
) -> None:
    """Gather a model and write it from rank 0.

    Args:
        whole, trained: see `full_state`.
        write: writes a state to a folder in the format that readers expect.

    Raises:
        TrainingError: the disk refused, on rank 0; all raise.
    """
    first = is_first()
    state = full_state(model, first, whole, trained=trained)
    agree = Agreement("save the model", "Checkpoints are as they were.")
    agree(lambda: write_folder(folder, lambda partial: write(partial, state)) if first else None)

"""Send the rows of a run to programs that draw them while it trains."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from longspan.config import LoggingConfig
from longspan.errors import ConfigError
from longspan.train.metrics import PHASES, Row

TENSORBOARD = "tensorboard"
_NAMES = {
    "train": ("loss", "grad_norm", "lr", "tokens"),
    "speed": ("tokens_per_s", "mfu", "mfu_full", "step_s", "exchange_share"),
    "memory": ("gpu_bytes", "host_bytes", "peak_gpu_bytes", "peak_host_bytes"),
    "seconds": tuple(f"{phase}_s" for phase in PHASES) + ("exchange_s",),
}


class Logger(Protocol):
    """Takes the scalars of each step."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a step's, by names such as `train/loss`."""
        ...

    def close(self) -> None:
        """Have everything arrive."""
        ...


@dataclass(frozen=True)
class About:
    """What loggers are told of a run.

    Args:
        folder: output folder.
        run: a name of the run that stays the same when it goes on.
        step: the first that they will get; what was logged of it and later ones before is void.
        config: the run's settings.
    """

    folder: Path
    run: str
    step: int
    project: str
    config: Mapping[str, Any]


class TensorBoard:
    """Writes event files to the output folder."""

    def __init__(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(about.folder / TENSORBOARD), purge_step=about.step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Logger.log`; a run that is killed loses at most the last step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See `Logger.close`."""
        self._writer.close()


class Weights:
    """Sends to Weights & Biases, as the environment has set it up; its files go to the output folder."""

    def __init__(self, about: About) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=about.project,
            id=about.run,
            name=about.folder.name,
            dir=str(about.folder),
            config=dict(about.config),
            resume="allow",
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """See `Logger.close`."""
        self._run.finish()


class Trackio:
    """Keeps runs in trackio's local database."""

    def __init__(self, about: About) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = trackio
        trackio.init(project=about.project, name=about.run, config=dict(about.config), resume="allow")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._trackio.log(dict(scalars), step=step)

    def close(self) -> None:
        """See `Logger.close`."""
        self._trackio.finish()


_LOGGERS: dict[str, Callable[[About], Logger]] = {TENSORBOARD: TensorBoard, "wandb": Weights, "trackio": Trackio}


def check_loggers(config: LoggingConfig) -> None:
    """Refuse loggers that were asked for and are not installed.

    Raises:
        ConfigError: names the package.
    """
    for name in config.to or ():
        if not _installed(name):
            raise ConfigError(
                f"logging.to asks for {name}, which is not installed: pip install {name}, or leave it out."
            )


def chosen(config: LoggingConfig) -> tuple[Sequence[str], str | None]:
    """Return the loggers of a run, and what is to be said about them."""
    if config.to is not None:
        return config.to, None
    if _installed(TENSORBOARD):
        return (TENSORBOARD,), None
    return (), "TensorBoard is not installed, so only metrics.jsonl is written (pip install tensorboard)"


def open_logger(name: str, about: About) -> Logger:
    """Start a logger."""
    return _LOGGERS[name](about)


def scalars(row: Row) -> dict[str, float]:
    """Return what loggers get of a step: all that is known of it and finite, in groups."""
    values = {**asdict(row), "exchange_share": row.exchange_share}
    flat = {f"{group}/{name}": values[name] for group, names in _NAMES.items() for name in names}
    return {name: value for name, value in flat.items() if value is not None and math.isfinite(value)}


def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name is not the package

"""What is known of a run besides its metrics: run.json, written as it starts and amended as it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from longspan import files
from longspan.errors import ConfigError, TrainingError

RUN = "run.json"
METRICS = "metrics.jsonl"
REPORT = "report.html"


class End(BaseModel):
    """How a run ended.

    Args:
        kind: all steps were taken; it was told to stop; or it could not go on.
        text: what a user was told.
        time: ISO 8601.
    """

    kind: Literal["ended", "stopped", "failed"]
    text: str
    time: str


class Device(BaseModel):
    """A GPU, or the host itself."""

    type: str
    name: str
    memory_bytes: int


class Place(BaseModel):
    """Where a run trains."""

    host: str
    platform: str
    processes: int
    device: str
    devices: list[Device]


class PlanFacts(BaseModel):
    """What was predicted of a step, where anything was: see `longspan.plan.plan.Plan`."""

    kernel: str = ""
    level: str | None = None
    reasons: list[str] = []
    seq_len: int | None = None
    gpu_bytes: dict[str, float] = {}
    host_bytes: dict[str, float] = {}
    seconds: dict[str, float] = {}
    tokens_per_s: float | None = None
    mfu: float | None = None


class Facts(BaseModel):
    """A run.

    Args:
        run: a name that stays the same when the run goes on.
        starts: ISO 8601, of the first start and of each time that it went on.
        introduction: model, engine and degrees in a line.
        data: what became of the documents, in a line.
        config: all settings.
        plan: None where nothing was planned.
        end: None until it ends.
    """

    run: str
    starts: list[str]
    introduction: str
    data: str = ""
    config: dict[str, Any]
    versions: dict[str, str | None]
    machine: Place
    plan: PlanFacts | None = None
    end: End | None = None


def write_facts(folder: Path, facts: Facts) -> None:
    """Write run.json, whole or not at all.

    Raises:
        TrainingError: the disk refused.
    """
    write_whole(folder / RUN, facts.model_dump_json(indent=1) + "\n")


def read_facts(folder: Path) -> Facts | None:
    """Read run.json; None where there is none.

    Raises:
        ConfigError: it is not what a run writes.
    """
    path = folder / RUN
    try:
        return Facts.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{path} cannot be read ({first}): put back what the run wrote, or remove it.") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader never sees half of it.

    Raises:
        TrainingError: the disk refused; what was there before is as it was.
    """
    try:
        files.write_whole(path, text)
    except OSError as error:
        raise TrainingError(f"Cannot write {path}: {error}.") from error

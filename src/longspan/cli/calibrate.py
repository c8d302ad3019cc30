"""Measure this host for plans."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any, TextIO

from longspan.cli.ranks import has_gpu, start
from longspan.errors import ConfigError, TopologyError


@dataclass(frozen=True)
class CalibrationJob:
    """Measure the devices of this host together.

    Args:
        kind: the name that they get.
    """

    processes: int
    kind: str
    device: str

    grouped = False
    modules = ("longspan.bench.calibrate",)

    def run(self, device: Any) -> dict[str, Any] | None:
        """Measure, as one of the processes."""
        from longspan.bench.calibrate import measured
        from longspan.once import is_first
        from longspan.plan.library import Entry

        found = measured(self.kind, device)
        return Entry.of(found).model_dump(mode="json") if is_first() else None


def calibrate(gpus: str, stream: TextIO) -> None:
    """Measure the devices that `gpus` names, all at once, and keep their figures for plans.

    Raises:
        TopologyError: there are fewer of them on this host.
        ConfigError: the file of the user's machines cannot be used.
    """
    from longspan.plan import library

    count, kind = library.split_gpus(gpus)
    on_cpu = kind == "cpu"
    if not on_cpu and not has_gpu():
        raise TopologyError(f"--calibrate measures {gpus}, but this host has no GPU: leave it out, or take --gpus cpu.")
    if not on_cpu:
        kind = _known_name(kind)
    entry = library.Entry.model_validate(start(CalibrationJob(count, kind, "cpu" if on_cpu else "cuda")))
    path = library.OWN_FILE.expanduser()
    try:
        library.write_machine(entry.machine(kind), path)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}, the file of your machines: {error}.") from None
    for name, value in entry.model_dump().items():
        print(f"{name:14} {value}", file=stream)
    print(f"{kind} is described in {path}, which all plans take", file=stream, flush=True)


def fitted(plan: Any, model: str, adapter: Any, gpus: str, host_bytes: int) -> dict[str, Any]:
    """Take one step as planned, of a model with random weights, in which attention runs in a few calls only.

    Returns:
        `peak_gib` and `predicted_gib` of tensors per device, and `seconds`, which most of attention is not in.

    Raises:
        TrainingError: it does not fit.
        LongspanError: the plan's engine is not served, or the step is not exact.
    """
    from longspan.bench.results import DONE, Target
    from longspan.bench.settings import AUTO, Asked, Setting, Work
    from longspan.cli.bench_jobs import WorkJob
    from longspan.errors import TrainingError
    from longspan.plan.library import split_gpus

    count, kind = split_gpus(gpus)
    work = Work(
        model,
        count,
        engine=plan.engine,
        optimizer=plan.optimizer,
        host_memory_bytes=host_bytes,
        adapter=adapter,
    )
    asked = Asked(work, (Setting(AUTO, plan.seq_len),), fit=True)
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        job = WorkJob(asked, Target(folder), None, "cpu" if kind == "cpu" else "cuda")
        (row,) = start(job)["rows"]
    if row["state"] != DONE:
        raise TrainingError(f"The step that was to be measured did not end: {row['state']}.")
    return {name: row[name] for name in ("peak_gib", "predicted_gib", "host_gib", "seconds")}


def _known_name(kind: str) -> str:
    """Return the whole name of a machine that is known ("h100" is h100-80g), else the name itself."""
    from longspan.plan.library import find_machine

    try:
        return find_machine(kind).name
    except ConfigError:
        return kind

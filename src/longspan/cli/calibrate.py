"""Measure this host for plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TextIO

from longspan.cli.ranks import has_gpu, start
from longspan.errors import ConfigError, TopologyError


@dataclass(frozen=True)
class CalibrationJob:
    """Measure the devices of this host together.

    Args:
        kind: the name that they get.
        small: measure on little, as tests do.
    """

    processes: int
    kind: str
    device: str
    small: bool = False

    grouped = False
    modules = ("longspan.bench.calibrate",)

    def run(self, device: Any) -> dict[str, Any] | None:
        """Measure, as one of the processes."""
        from longspan.bench.calibrate import measured
        from longspan.once import is_first
        from longspan.plan.library import Entry

        found = measured(self.kind, device, self.small)
        return Entry.of(found).model_dump(mode="json") if is_first() else None


def calibrate(gpus: str, stream: TextIO, small: bool = False) -> None:
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
    entry = library.Entry.model_validate(start(CalibrationJob(count, kind, "cpu" if on_cpu else "cuda", small)))
    path = library.OWN_FILE.expanduser()
    try:
        library.write_machine(entry.machine(kind), path)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}, the file of your machines: {error}.") from None
    for name, value in entry.model_dump().items():
        print(f"{name:14} {value}", file=stream)
    print(f"{kind} is described in {path}, which all plans take", file=stream, flush=True)


def _known_name(kind: str) -> str:
    """Return the whole name of a machine that is known ("h100" is h100-80g), else the name itself."""
    from longspan.plan.library import find_machine

    try:
        return find_machine(kind).name
    except ConfigError:
        return kind

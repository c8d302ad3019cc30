"""The machines that plans know: those of this package, and a user's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from longspan.config.section import Float
from longspan.errors import ConfigError
from longspan.files import write_whole
from longspan.plan.machine import GIB, KernelRate, Machine

OWN_FILE = Path("~/.config/longspan/machines.yaml")
"""A user's own machines; it need not exist."""

_EXPAND = ("aten-flash", "fa2")
"""Kernels whose backward makes dk and dv for every query head before adding them up."""

_Rate = Annotated[Float, Field(gt=0)]
_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]


class Entry(BaseModel):
    """A machine as files describe it; `machines.yaml` beside this module explains the names and units."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: tuple[str, ...] = ()
    memory_gib: _Rate
    peak_tflops: _Rate
    gemm_tflops: _Rate
    memory_gbs: _Rate
    host_gbs: _Rate
    link_gbs: _Rate
    network_gbs: _Rate
    kernels: Annotated[dict[str, tuple[_Rate, _Rate]], Field(min_length=1)]
    source: str

    @classmethod
    def of(cls, machine: Machine) -> Entry:
        """Return a machine as files describe it."""
        return cls(
            memory_gib=machine.memory_bytes / GIB,
            kernels={rate.name: (rate.forward_tflops, rate.backward_tflops) for rate in machine.kernels},
            **{name: getattr(machine, name) for name in cls.model_fields if name not in ("memory_gib", "kernels")},
        )

    def machine(self, name: str) -> Machine:
        """Return the machine itself."""
        rates = (KernelRate(kernel, *both, expands=kernel in _EXPAND) for kernel, both in self.kernels.items())
        plain = self.model_dump(exclude={"memory_gib", "kernels"})
        return Machine(name, round(self.memory_gib * GIB), kernels=tuple(rates), **plain)


_ENTRIES = TypeAdapter(dict[_Name, Entry])


def read_machines(text: str, where: str) -> dict[str, Machine]:
    """Read a file of machines.

    Raises:
        ConfigError: it is none; the message names the place and what is expected there.
    """
    try:
        entries = _ENTRIES.validate_python(yaml.safe_load(text) or {})
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())[:200]}.") from None
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors()[:8]]
        raise ConfigError(f"{where} does not describe machines: " + "; ".join(problems) + ".") from None
    return {name: entry.machine(name) for name, entry in entries.items()}


def write_machine(machine: Machine, path: Path) -> None:
    """Put a machine into a user's file, in the place of one of that name; comments of the file are lost."""
    known = read_machines(path.read_text(encoding="utf-8"), str(path)) if path.exists() else {}
    known[machine.name] = machine
    plain = {name: Entry.of(m).model_dump(mode="json") for name, m in known.items()}
    write_whole(path, yaml.safe_dump(plain, sort_keys=False))


@lru_cache
def _shipped() -> Mapping[str, Machine]:
    file = files("longspan.plan").joinpath("machines.yaml")
    return MappingProxyType(read_machines(file.read_text(encoding="utf-8"), "machines.yaml"))


def machines() -> dict[str, Machine]:
    """Return all machines by name; a user's own come first, and in the place of ours of that name.

    Raises:
        ConfigError: the user's file cannot be used.
    """
    path = OWN_FILE.expanduser()
    try:
        own = read_machines(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        own = {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}, the file of your machines: {error}.") from None
    return {**own, **{name: machine for name, machine in _shipped().items() if name not in own}}


def find_machine(name: str) -> Machine:
    """Return a machine by name, in any case; what follows a dash may be left out (h100 is h100-80g).

    Raises:
        ConfigError: there is none.
    """
    known, wanted = machines(), name.lower()
    found = known.get(wanted) or next((m for key, m in known.items() if key.split("-")[0] == wanted), None)
    if found is None:
        raise ConfigError(
            f"There are no figures for a machine {name!r}; known are {', '.join(known)}. Describe it in {OWN_FILE}, "
            "or let `longspan plan --calibrate` measure it."
        )
    return found


def machine_of(device_name: str) -> Machine | None:
    """Return the machine that a driver's name means, as "NVIDIA H100 PCIe"; None if it is not known."""
    text = device_name.lower()
    fits = [(len(part), m) for m in machines().values() for part in m.names if part.lower() in text]
    return max(fits, key=lambda fit: fit[0], default=(0, None))[1]


def parse_gpus(text: str) -> tuple[int, Machine]:
    """Read "2xH200" -> 2 and the machine; "H200" is one.

    Raises:
        ConfigError: it cannot be read, or the machine is not known.
    """
    count, kind = split_gpus(text)
    return count, find_machine(kind)


def split_gpus(text: str) -> tuple[int, str]:
    """Read "2xH200" -> 2 and "h200", whether such a machine is known or not.

    Raises:
        ConfigError: it cannot be read.
    """
    match = re.fullmatch(r"(?:(\d{1,6})\s*x\s*)?([a-z][a-z0-9-]*)", text.strip().lower())
    if match is None or not int(match[1] or 1):
        raise ConfigError(f"GPUs are given as a number and a kind, such as 2xH200, got {text!r}.")
    return int(match[1] or 1), match[2]

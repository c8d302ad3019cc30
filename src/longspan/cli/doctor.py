"""`longspan doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Annotated, Any

import typer

from longspan.cli.allocator import EXPANDABLE, allocator
from longspan.errors import ConfigError

_PACKAGES = ("longspan", "torch", "transformers", "tokenizers", "safetensors")
_EXTRAS = ("accelerate", "datasets", "deepspeed", "matplotlib", "peft", "torchao")


def doctor(json_: Annotated[bool, typer.Option("--json", help="Print JSON. (default false)")] = False) -> None:
    """Say what is installed here, which attention kernels and optimizers can run, and why others cannot."""
    facts = examine()
    if json_:
        print(json.dumps(facts, indent=2))
        return
    for name, version in facts["versions"].items():
        print(f"{name:14} {version or 'not installed'}")
    for device in facts["devices"]:
        print(f"{'device':14} {device['name']}, {device['memory_bytes'] / 2**30:.1f} GiB")
    for name, reason in facts["kernels"].items():
        print(f"{'kernel':14} {name}: {'usable' if reason is None else reason}")
    for kind, reason in facts["optimizers"].items():
        print(f"{'optimizer':14} {kind}: {'usable' if reason is None else reason}")
    print(f"{'allocator':14} {_allocator(facts['allocator'])}")


def examine() -> dict[str, Any]:
    """Gather what `doctor` shows."""
    import psutil
    import torch

    from longspan.kernels.select import available
    from longspan.optim import KINDS

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    devices = [{"type": "cuda", "name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus]
    host = {"type": "cpu", "name": f"{os.cpu_count()} CPU cores", "memory_bytes": psutil.virtual_memory().total}
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in (*_PACKAGES, *_EXTRAS)}},
        "devices": [*devices, host],
        "kernels": available(torch.device("cuda" if gpus else "cpu")),
        "optimizers": {kind: _refusal(kind) for kind in KINDS},
        "allocator": allocator(),
    }


def _allocator(setting: str | None) -> str:
    if setting is None:
        return f"default; `longspan train` sets {EXPANDABLE}"
    if EXPANDABLE in setting:
        return setting
    return f"{setting}, which `longspan train` leaves as it is; without {EXPANDABLE} long sequences fragment GPU memory"


def _refusal(kind: str) -> str | None:
    from longspan.optim import check_kind

    try:
        check_kind(kind)
    except ConfigError as error:
        return str(error)
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

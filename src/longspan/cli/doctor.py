"""`longspan doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Annotated, Any

import typer

_PACKAGES = ("longspan", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "peft", "deepspeed")


def doctor(json_: Annotated[bool, typer.Option("--json", help="Print JSON. (default false)")] = False) -> None:
    """Say what is installed here, which attention kernels can run, and why others cannot."""
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
    print(f"{'allocator':14} {facts['allocator'] or 'default; `longspan train` sets expandable_segments:True'}")


def examine() -> dict[str, Any]:
    """Gather what `doctor` shows."""
    import psutil
    import torch

    from longspan.kernels.select import available

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    devices = [{"type": "cuda", "name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus]
    host = {"type": "cpu", "name": f"{os.cpu_count()} CPU cores", "memory_bytes": psutil.virtual_memory().total}
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "devices": [*devices, host],
        "kernels": available(torch.device("cuda" if gpus else "cpu")),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

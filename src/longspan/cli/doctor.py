"""`longspan doctor`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from longspan.cli.allocator import EXPANDABLE, allocator
from longspan.errors import ConfigError


def doctor(json_: Annotated[bool, typer.Option("--json", help="Print JSON. (default false)")] = False) -> None:
    """Say what is installed here, which attention kernels and optimizers can run, and why others cannot."""
    from longspan.report.words import gib

    facts = examine()
    if json_:
        print(json.dumps(facts, indent=2))
        return
    for name, version in facts["versions"].items():
        print(f"{name:14} {version or 'not installed'}")
    for device in facts["devices"]:
        print(f"{'device':14} {device['name']}, {gib(device['memory_bytes'])}")
    for name, reason in facts["kernels"].items():
        print(f"{'kernel':14} {name}: {'usable' if reason is None else reason}")
    for kind, reason in facts["optimizers"].items():
        print(f"{'optimizer':14} {kind}: {'usable' if reason is None else reason}")
    print(f"{'allocator':14} {_allocator(facts['allocator'])}")


def examine() -> dict[str, Any]:
    """Gather what `doctor` shows."""
    import torch

    from longspan.kernels.select import available
    from longspan.optim import KINDS
    from longspan.report.place import devices
    from longspan.versions import versions

    return {
        "versions": versions(),
        "devices": [device.model_dump() for device in devices()],
        "kernels": available(torch.device("cuda" if torch.cuda.device_count() else "cpu")),
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

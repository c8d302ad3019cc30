"""`longspan doctor`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from longspan.cli.allocator import EXPANDABLE, allocator, pinned_memory, pinning_problem
from longspan.cli.links import links
from longspan.errors import ConfigError


def doctor(json_: Annotated[bool, typer.Option("--json", help="Print JSON. (default false)")] = False) -> None:
    """Say what is installed here, how GPUs are linked, which kernels and optimizers can run, and why others cannot."""
    from longspan.report.words import gib

    facts = examine()
    if json_:
        print(json.dumps(facts, indent=2))
        return
    for name, version in facts["versions"].items():
        print(f"{name:22} {version or 'not installed'}")
    for reason in facts["unsupported"]:
        print(f"{'unsupported':22} longspan needs {reason}")
    for device in facts["devices"]:
        print(f"{'device':22} {device['name']}, {gib(device['memory_bytes'])}")
    for link in facts["links"]:
        print(f"{'link':22} {_link(link)}")
    for name, reason in facts["kernels"].items():
        print(f"{'kernel':22} {name}: {'usable' if reason is None else reason}")
    for kind, reason in facts["optimizers"].items():
        print(f"{'optimizer':22} {kind}: {'usable' if reason is None else reason}")
    print(f"{'allocator':22} {_allocator(facts['allocator'])}")
    print(f"{'pinned memory':22} {pinning_problem() or facts['pinned_memory'] or 'by torch'}")


def examine() -> dict[str, Any]:
    """Gather what `doctor` shows."""
    import torch

    from longspan.kernels.select import available
    from longspan.optim import KINDS
    from longspan.report.place import devices
    from longspan.versions import SUPPORTED, refusal, versions

    found = versions()

    return {
        "versions": found,
        "unsupported": [reason for name in SUPPORTED if found[name] and (reason := refusal(name))],
        "devices": [device.model_dump() for device in devices()],
        "links": links(),
        "kernels": available(torch.device("cuda" if torch.cuda.device_count() else "cpu")),
        "optimizers": {kind: _refusal(kind) for kind in KINDS},
        "allocator": allocator(),
        "pinned_memory": pinned_memory(),
    }


def _link(link: dict[str, Any]) -> str:
    a, b = link["gpus"]
    access = "peer access" if link["peer_access"] else "no peer access: copies go through the host"
    return f"GPU {a} - GPU {b}: {link['kind'] or 'nvidia-smi does not say'}, {access}"


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

"""How the GPUs of this host are linked, pair by pair."""

from __future__ import annotations

import re
import subprocess
from itertools import combinations
from typing import Any

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_TIMEOUT_S = 30


def links() -> list[dict[str, Any]]:
    """Return, for each pair of visible GPUs, whether each reaches the other's memory, and by what.

    The kind is nvidia-smi's word: NV18 for 18 NVLinks, PIX, PXB, PHB and NODE for PCIe ever further apart, SYS for the
    way between sockets; None where nvidia-smi does not say.
    """
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return []
    names = [str(getattr(torch.cuda.get_device_properties(gpu), "uuid", "")) for gpu in range(count)]
    kinds = parse_topology(_ask("topo", "-m"))
    numbers = parse_numbers(_ask("--query-gpu=index,uuid", "--format=csv,noheader"))
    reach = torch.cuda.can_device_access_peer
    return [
        {
            "gpus": [a, b],
            "peer_access": reach(a, b) and reach(b, a),
            "kind": kinds.get((numbers.get(names[a], -1), numbers.get(names[b], -1))),
        }
        for a, b in combinations(range(count), 2)
    ]


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Read the matrix of `nvidia-smi topo -m`: by nvidia-smi's numbers of two GPUs, the kind of their link."""
    rows = [_ESCAPE.sub("", line).split("\t") for line in text.splitlines()]
    header = next((row for row in rows if any(cell.strip() == "GPU0" for cell in row[1:])), [])
    columns = {at: number for at, cell in enumerate(header) if (number := _number(cell)) is not None}
    found = {}
    for row in rows:
        first = _number(row[0])
        for at, second in columns.items():
            if first is not None and first != second and at < len(row) and row is not header:
                found[first, second] = row[at].strip()
    return found


def parse_numbers(text: str) -> dict[str, int]:
    """Read lines `index, GPU-uuid`: a process may see fewer GPUs than nvidia-smi, in another order."""
    pairs = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    return {uuid.strip().removeprefix("GPU-"): int(index) for index, uuid in pairs}


def _number(cell: str) -> int | None:
    match = re.fullmatch(r"GPU(\d+)", cell.strip())
    return int(match[1]) if match else None


def _ask(*arguments: str) -> str:
    """Return what nvidia-smi prints, nothing where it is missing or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout

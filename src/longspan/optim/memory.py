"""How much host memory a process can still have."""

from __future__ import annotations

from pathlib import Path

import psutil

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_bytes(control_group: Path = _CONTROL_GROUP) -> int:
    """Return what the host has available, or the process's container, if that has less.

    Args:
        control_group: folder of the container's limit (cgroup v2); one without a limit does not count.
    """
    free_bytes = psutil.virtual_memory().available
    try:
        limit = (control_group / "memory.max").read_text().strip()
        used_bytes = int((control_group / "memory.current").read_text())
        stat = dict(line.split() for line in (control_group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free_bytes
    if limit == "max":
        return free_bytes
    cached_bytes = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # given up when asked for
    return min(free_bytes, int(limit) - used_bytes + cached_bytes)

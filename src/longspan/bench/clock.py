"""Seconds and bytes of work that several processes do together."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from longspan.once import is_first

GIB = 1 << 30


@dataclass(frozen=True)
class Deadline:
    """When to stop, as seconds since the epoch; None for never."""

    until: float | None = None

    def allows(self, needed_s: float, device: torch.device) -> bool:
        """Tell whether so many seconds are left. Rank 0 decides for all; every rank calls it."""
        left = self.until is None or time.time() + needed_s <= self.until
        return bool(of_rank_0(float(left), device))


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Run work that all ranks begin together; return the seconds of the slowest, and this rank's result."""
    settle(device)
    if dist.is_initialized():
        dist.barrier()
    settle(device)
    start = time.perf_counter()
    result = work()
    settle(device)
    return largest(time.perf_counter() - start, device), result


def rounds_ms(work: Callable[[], Any], times: int, warm_up: int, device: torch.device) -> list[float]:
    """Return the milliseconds of each of `times` runs; on a GPU they follow each other without a gap."""
    for _ in range(warm_up):
        work()
    settle(device)
    if device.type != "cuda":
        return [1e3 * _seconds(work) for _ in range(times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    settle(device)
    return [start.elapsed_time(end) for start, end in zip(marks, marks[1:], strict=False)]


def median(values: Sequence[float], digits: int = 4) -> float:
    """Return the median, rounded."""
    return round(statistics.median(values), digits)


def largest(value: float, device: torch.device) -> float:
    """Return the largest value over the ranks."""
    return _reduced(value, dist.ReduceOp.MAX, device)


def of_rank_0(value: float, device: torch.device) -> float:
    """Return rank 0's value on every rank."""
    return _reduced(value if is_first() else 0.0, dist.ReduceOp.SUM, device)


def forget_peaks(device: torch.device) -> None:
    """Start a new record of GPU memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def rounded_gib(size_bytes: float) -> float:
    """Return bytes in GiB, to four digits at least."""
    return round(size_bytes / GIB, 2 if size_bytes >= 10 * GIB else 4)


def peaks(device: torch.device, tracked_bytes: int = 0) -> dict[str, float]:
    """Return, in GiB: the peak of tensors and of what the allocator held for them on the fullest GPU, and the most
    host memory that the processes have had, added up.

    Args:
        tracked_bytes: the peak of tensors of this process, where there is no GPU.
    """
    tensors, held = tracked_bytes, 0
    if device.type == "cuda":
        tensors, held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "peak_gib": rounded_gib(largest(tensors, device)),
        "reserved_gib": rounded_gib(largest(held, device)),
        "host_gib": rounded_gib(_reduced(host, dist.ReduceOp.SUM, device)),
    }


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _reduced(value: float, how: Any, device: torch.device) -> float:
    if not dist.is_initialized():
        return float(value)
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, how)
    return float(held)

"""Where the time of a piece of GPU work goes: kernel seconds by kind, what ran alone, and when nothing ran."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

_KINDS = (
    ("nccl", r"nccl"),
    ("attention", r"flash|fmha|FlashAttention|Flash"),
    ("matrix products", r"nvjet|gemm|xmma|cublas"),
    ("compiled elementwise", r"triton"),
    ("copies", r"Memcpy|Memset|copy|cat_array|CatArray"),
    ("optimizer", r"adam|FusedAdam|multi_tensor|norm_kernel|LpNorm"),
)

Span = tuple[int, int]


def timeline(work: Callable[[], Any]) -> str:
    """Run `work` under the profiler and describe what the GPU did.

    Returns:
        Lines: wall, busy and idle seconds; per kind its kernel seconds and those under which no other kind ran; the
        longest kernels; the largest gaps with what stands around them.
    """
    from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        work()
        torch.cuda.synchronize()
    found: Any = prof.profiler
    events = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in found.kineto_results.events()
        if e.device_type() == DeviceType.CUDA and e.duration_ns() > 0 and "annotation" not in e.name()
    ]
    return describe(sorted(events))


def describe(events: Sequence[tuple[int, int, str]]) -> str:
    """Describe kernels (start, end in ns, name), sorted by start."""
    if not events:
        return "no kernels"
    by_kind: dict[str, list[Span]] = defaultdict(list)
    by_name: dict[str, list[int]] = defaultdict(list)
    for start, end, name in events:
        by_kind[_kind(name)].append((start, end))
        by_name[name].append(end - start)
    busy = _union([(a, b) for a, b, _ in events])
    wall = max(b for _, b, _ in events) - events[0][0]
    lines = [f"wall {wall / 1e9:.3f} s, busy {_length(busy) / 1e9:.3f} s, idle {(wall - _length(busy)) / 1e9:.3f} s"]
    for kind, spans in sorted(by_kind.items(), key=lambda item: -sum(b - a for a, b in item[1])):
        rest = _union([s for other, others in by_kind.items() if other != kind for s in others])
        alone = _length(busy) - _length(rest)
        total = sum(b - a for a, b in spans)
        lines.append(f"  {total / 1e9:8.3f} s {kind:22s} alone {alone / 1e9:8.3f} s, {len(spans)} kernels")
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:28]:
        lines.append(f"    {sum(times) / 1e9:8.4f} s {len(times):6d} {name[:110]}")
    gaps = sorted(_gaps(events), reverse=True)
    small = sum(g for g, *_ in gaps if g < 20_000)
    lines.append(f"  gaps under 20 us: {small / 1e9:.3f} s; the largest:")
    lines += [f"    {g / 1e6:8.3f} ms after {before[:50]} before {after[:50]}" for g, before, after in gaps[:12]]
    around: dict[tuple[str, str], list[int]] = defaultdict(list)
    for gap, before, after in gaps:
        around[before[:40], after[:40]].append(gap)
    lines.append("  gaps by what stands around them:")
    for (before, after), times in sorted(around.items(), key=lambda item: -sum(item[1]))[:12]:
        lines.append(f"    {sum(times) / 1e6:8.2f} ms {len(times):5d} x {before} -> {after}")
    return "\n".join(lines)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "elementwise")


def _union(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Sequence[Span]) -> int:
    return sum(b - a for a, b in spans)


def _gaps(events: Sequence[tuple[int, int, str]]) -> list[tuple[int, str, str]]:
    end, name, gaps = events[0][1], events[0][2], []
    for start, stop, following in events[1:]:
        if start > end:
            gaps.append((start - end, name, following))
        if stop > end:
            end, name = stop, following
    return gaps

"""Plans as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from longspan.plan.machine import GIB
from longspan.plan.plan import Plan
from longspan.report.words import short


def lengths_table(plans: Sequence[Plan]) -> Table:
    """Return a row per length: what it takes and how fast it is."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tokens", "s/step", "tokens/s", "MFU", "GiB per device", "GiB host per rank"):
        table.add_column(name, justify="right")
    for name in ("ulysses x ring x replicas", "optimizer", "level", "layers keep"):
        table.add_column(name)
    for plan in plans:
        table.add_row(
            f"{plan.seq_len:,}",
            short(plan.step_s or 0),
            f"{plan.tokens_per_s:,.0f}",
            "" if plan.mfu is None else f"{100 * plan.mfu:.0f} %",
            _gib(sum(plan.gpu_bytes.values())),
            _gib(sum(plan.host_bytes.values())),
            f"{plan.ulysses_degree} x {plan.ring_degree} x {plan.data_parallel_size}",
            plan.optimizer,
            plan.level,
            plan.layers_keep,
        )
    return table


def causes_table(plan: Plan) -> Table:
    """Return what needs a plan's memory and its time, the most first, and the sums."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cause")
    for name in ("GiB per device", "GiB host per rank", "seconds"):
        table.add_column(name, justify="right")
    sizes = (plan.gpu_bytes, plan.host_bytes)
    for cause in _by_size({**plan.host_bytes, **plan.gpu_bytes}):
        table.add_row(cause, *(_gib(held[cause]) if cause in held else "" for held in sizes), "")
    for cause in _by_size(plan.seconds):
        table.add_row(cause, "", "", short(plan.seconds[cause]))
    table.add_section()
    table.add_row("in all", *(_gib(sum(held.values())) for held in sizes), short(plan.step_s or 0), style="bold")
    return table


def _by_size(numbers: Mapping[str, float]) -> Iterable[str]:
    return sorted(numbers, key=lambda cause: -numbers[cause])


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f}" if size_bytes else "0"

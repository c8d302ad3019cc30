"""What a page shows of a run: key figures, charts, and what was planned beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longspan.report.charts import Chart, Series
from longspan.report.story import Story
from longspan.report.words import duration, gib, percent, short

PHASES = {
    "data": ("data", "d"),
    "forward": ("forward", "a"),
    "backward": ("backward", "c"),
    "reduce": ("gradient reduction", "b"),
    "optimizer": ("optimizer", "e"),
    "other": ("other", "f"),
}
"""Parts of a step by their names in metrics.jsonl: what they are called, and their color."""

_SMOOTHED_STEPS = 60
"""Shorter runs are shown without a smoothed loss."""


@dataclass(frozen=True)
class Figure:
    """A number that stands for the run."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """What was planned, and what came."""

    name: str
    planned: str
    measured: str
    difference: str


def figures(story: Story) -> list[Figure]:
    """Return the key figures of a run that has steps."""
    loss, gpu, host = story.known("loss"), story.largest("peak_gpu_bytes"), story.largest("peak_host_bytes")
    skipped = sum(row.get("loss") is None or row.get("grad_norm") is None for row in story.rows)
    found = [
        Figure("Loss", short(loss[-1]), f"from {short(loss[0])}") if loss else None,
        _median(story, "Tokens per second", "tokens_per_s", lambda v: f"{v:,.0f}", "median, each counted once"),
        _median(story, "Step", "step_s", lambda v: f"{short(v)} s", "median"),
        _mfu(story),
        _waiting(story),
        Figure("GPU memory", gib(gpu), "peak of the fullest GPU") if gpu else None,
        Figure("Host memory", gib(host), "peak of the largest process") if host else None,
        Figure("Skipped steps", f"{skipped:,}", "not finite, gaps in the charts") if skipped else None,
        Figure("Tokens", f"{sum(story.known('tokens')):,.0f}", f"{len(story.rows):,} steps in {_time(story)}"),
    ]
    return [figure for figure in found if figure is not None]


def _time(story: Story) -> str:
    return duration(sum(story.known("step_s")))


def _median(story: Story, name: str, column: str, show: Callable[[float], str], note: str) -> Figure | None:
    value = story.median(column)
    return None if value is None else Figure(name, show(value), note)


def _mfu(story: Story) -> Figure | None:
    masked, full = story.median("mfu"), story.median("mfu_full")
    if masked is None:
        return None
    return Figure("MFU", percent(masked), "" if full is None else f"{percent(full)} with attention unmasked")


def _waiting(story: Story) -> Figure | None:
    steps, waits = sum(story.known("step_s")), sum(story.known("exchange_s"))
    return Figure("Waiting for exchanges", percent(waits / steps), "share of the time") if waits and steps else None


def charts(story: Story) -> list[Chart]:
    """Return the charts of a run that has steps; those without a value are left out."""
    steps = [int(value or 0) for value in story.column("step")]
    found = [
        Chart("Loss", steps, _loss(story), zero=False),
        _norm(story, steps),
        Chart("Learning rate", steps, [Series("learning rate", story.column("lr"), "a")]),
        Chart("Tokens per second", steps, [Series("tokens per second", story.column("tokens_per_s"), "a")]),
        Chart("Memory", steps, _memory(story), unit=" GiB", note="the fullest process; GPU: peak within each step"),
        Chart("Model FLOPs utilization", steps, _utilization(story), unit=" %"),
        Chart("Waiting for exchanges", steps, _waits(story), unit=" %", note="share of a step, first process"),
        Chart(
            "Where a step's time goes", steps, _phases(story), unit=" s", stacked=True, note="seconds, first process"
        ),
    ]
    return [chart for chart in found if any(v is not None for line in chart.series for v in line.values)]


def _loss(story: Story) -> list[Series]:
    values = story.column("loss")
    if len(values) < _SMOOTHED_STEPS:
        return [Series("loss", values, "a")]
    width = len(values) // 30 | 1
    return [Series("loss", values, "faint f"), Series(f"mean of {width} steps", _smoothed(values, width), "a")]


def _smoothed(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return the mean around each value; a mean of those before it would lag behind a curve that falls."""
    means: list[float | None] = []
    for i in range(len(values)):
        known = [value for value in values[max(0, i - width // 2) : i + width // 2 + 1] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def _norm(story: Story, steps: Sequence[int]) -> Chart:
    values, middle, most = story.column("grad_norm"), story.median("grad_norm"), story.largest("grad_norm")
    spikes = bool(middle) and most is not None and middle is not None and most > 20 * middle
    return Chart(
        "Gradient norm", steps, [Series("gradient norm", values, "a")], logarithmic=spikes, note="before clipping"
    )


def _scaled(values: Sequence[float | None], factor: float) -> list[float | None]:
    return [None if value is None else value * factor for value in values]


def _memory(story: Story) -> list[Series]:
    plan = None if story.facts is None else story.facts.plan
    lines = []
    for name, column, planned, color in (
        ("GPU", "gpu_bytes", {} if plan is None else plan.gpu_bytes, "a"),
        ("host", "host_bytes", {} if plan is None else plan.host_bytes, "b"),
    ):
        values = story.column(column)
        if not any(values):
            continue
        lines.append(Series(name, _scaled(values, 2**-30), color))
        if name == "GPU" and planned:
            lines.append(Series("GPU, planned", [sum(planned.values()) / 2**30] * len(values), f"dash {color}"))
    return lines


def _utilization(story: Story) -> list[Series]:
    return [
        Series("causal attention", _scaled(story.column("mfu"), 100), "a"),
        Series("attention unmasked", _scaled(story.column("mfu_full"), 100), "b"),
    ]


def _waits(story: Story) -> list[Series]:
    if not any(story.column("exchange_s")):
        return []
    pairs = zip(story.column("exchange_s"), story.column("step_s"), strict=True)
    return [Series("waiting", [100 * a / b if a is not None and b else None for a, b in pairs], "a")]


def _phases(story: Story) -> list[Series]:
    found = [Series(name, story.column(f"{phase}_s"), color) for phase, (name, color) in PHASES.items()]
    return [line for line in found if any(line.values)]


def comparisons(story: Story) -> list[Comparison]:
    """Return what was planned beside what was measured; empty where the plan predicted nothing or no step was taken."""
    plan = None if story.facts is None else story.facts.plan
    if plan is None or not story.rows:
        return []
    once = story.config.get("gradient_accumulation_steps", 1) == 1  # a plan knows one micro-batch alone
    planned = {
        "GPU memory, peak": (sum(plan.gpu_bytes.values()) or None, story.largest("gpu_bytes") or None, gib),
        "Seconds per step, median": (sum(plan.seconds.values()) * once or None, story.median("step_s"), short),
        "Tokens per second, median": (
            plan.tokens_per_s if once else None,
            story.median("tokens_per_s"),
            lambda v: f"{v:,.0f}",
        ),
        "MFU, causal attention": (plan.mfu if once else None, story.median("mfu"), percent),
    }
    return [
        Comparison(name, show(before), show(after), f"{100 * (after / before - 1):+.1f} %")
        for name, (before, after, show) in planned.items()
        if before is not None and after is not None
    ]


def unplanned(story: Story) -> str:
    """Say why nothing can be compared."""
    if story.facts is None:
        return "This run left no run.json, so what was planned is not known."
    if not story.rows:
        return "No step was recorded, so there is nothing to compare with the plan."
    memory = story.config.get("memory")
    keep = memory.get("keep") if isinstance(memory, dict) else None
    if keep != "auto":
        return f"This run had no automatic plan: memory.keep was set to {keep}, so nothing was predicted."
    if story.facts.machine.device != "cuda":
        return "On CPUs the plan predicts nothing where all activations fit, as they did here."
    return "The plan predicted nothing for this run."

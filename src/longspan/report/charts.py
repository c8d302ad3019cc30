"""Line charts as inline SVG that stretches to any width, its texts beside it, in HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from longspan.report.words import short

_POINTS = 240
"""Most points of a line; more are not seen on a screen and make the page heavy."""

_SIDE = 1000.0


@dataclass(frozen=True)
class Series:
    """A line, or a layer of a stack.

    Args:
        values: one per step of the chart; None where there is none.
        color: class of the style sheet.
    """

    name: str
    values: Sequence[float | None]
    color: str


@dataclass(frozen=True)
class Chart:
    """What is drawn over the steps.

    Args:
        unit: written behind values.
        zero: whether the axis begins at 0.
        stacked: draw areas on top of each other in place of lines.
        logarithmic: for values that span orders of magnitude; those that are not positive are left out.
        note: a sentence below the title.
    """

    title: str
    steps: Sequence[int]
    series: Sequence[Series]
    unit: str = ""
    zero: bool = True
    stacked: bool = False
    logarithmic: bool = False
    note: str = ""


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    logarithmic: bool

    def at(self, value: float) -> float:
        """Return how far up a value lies, from 0 to 1."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return (value - low) / (high - low) if high > low else 0.5


def draw(chart: Chart) -> str:
    """Return a chart as HTML, everything escaped."""
    steps, series = _thinned(chart)
    tops = _stacks(series) if chart.stacked else [line.values for line in series]
    if chart.logarithmic:
        tops = [[v if v is not None and v > 0 else None for v in line] for line in tops]
    values = [value for line in tops for value in line if value is not None]
    axis = _axis(values, chart.zero or chart.stacked, chart.logarithmic)
    xs = [_SIDE * (s - steps[0]) / max(1, steps[-1] - steps[0]) for s in steps] if len(steps) > 1 else [_SIDE / 2]
    paths = [
        f'<path class="grid" d="M0 {_SIDE * (1 - axis.at(tick)):.1f}H{_SIDE:.0f}"/>' for tick in _ticks(axis, chart)
    ]
    below: Sequence[float | None] = [0.0] * len(steps)
    for line, top in zip(series, tops, strict=True):
        ys = [None if value is None else _SIDE * (1 - axis.at(value)) for value in top]
        if chart.stacked:
            floor = [_SIDE * (1 - axis.at(value or 0.0)) for value in below]
            paths.append(f'<path class="area {line.color}" d="{_area(xs, ys, floor)}"/>')
            below = top
        else:
            paths.append(f'<path class="line {line.color}" d="{_line(xs, ys)}"/>')
    points = json.dumps([[round(x, 1) for x in xs], steps, *(_shown(line.values) for line in series)])
    names = json.dumps([line.name for line in series])
    return (
        f'<figure class="chart" data-points="{escape(points)}" data-names="{escape(names)}" '
        f'data-unit="{escape(chart.unit)}"><figcaption><h3>{escape(chart.title)}</h3>{_legend(chart, series)}'
        f"{f'<p>{escape(chart.note)}</p>' if chart.note else ''}</figcaption>"
        f'<div class="plot"><svg viewBox="0 0 {_SIDE:.0f} {_SIDE:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(_told(chart))}">{"".join(paths)}</svg>{_labels(axis, chart, steps)}</div></figure>'
    )


def _thinned(chart: Chart) -> tuple[list[int], list[Series]]:
    """Return at most `_POINTS` points: of each run of steps the first line's extremes, or a stack's means."""
    n = len(chart.steps)
    if n <= _POINTS:
        return list(chart.steps), list(chart.series)
    count = _POINTS if chart.stacked else _POINTS // 2
    runs = [range(n * i // count, n * (i + 1) // count) for i in range(count)]
    if chart.stacked:
        means = [[_mean([line.values[i] for i in run]) for run in runs] for line in chart.series]
        kept = [Series(line.name, mean, line.color) for line, mean in zip(chart.series, means, strict=True)]
        return [chart.steps[run[-1]] for run in runs], kept
    first = chart.series[0].values
    picked: set[int] = {0, n - 1}
    for run in runs:
        seen = [i for i in run if first[i] is not None] or [run[0]]
        picked |= {min(seen, key=lambda i: first[i] or 0.0), max(seen, key=lambda i: first[i] or 0.0)}
    order = sorted(picked)
    kept = [Series(line.name, [line.values[i] for i in order], line.color) for line in chart.series]
    return [chart.steps[i] for i in order], kept


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _stacks(series: Sequence[Series]) -> list[list[float]]:
    """Return how high each layer reaches."""
    height = [0.0] * len(series[0].values)
    return [height := [a + (b or 0.0) for a, b in zip(height, line.values, strict=True)] for line in series]


def _axis(values: Sequence[float], zero: bool, logarithmic: bool) -> _Axis:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if logarithmic and values:
        return _Axis(low / 1.3, high * 1.3, True)
    room = 0.06 * ((high - min(low, 0.0) if zero else high - low) or abs(high) or 1.0)
    return _Axis(min(low, 0.0) if zero else low - room, high + room, False)


def _ticks(axis: _Axis, chart: Chart) -> list[float]:
    """Return round values, three to six of them."""
    if axis.logarithmic:
        powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
        factors = (1,) if len(powers) > 3 else (1, 3)
        found = [factor * 10.0**power for power in powers for factor in factors]
        return [tick for tick in found if axis.low <= tick <= axis.high][:: max(1, len(powers) // 5)]
    step = _round((axis.high - axis.low) / 4)
    first = math.ceil(axis.low / step)
    return [step * i for i in range(first, math.floor(axis.high / step) + 1)]


def _round(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)


def _labels(axis: _Axis, chart: Chart, steps: Sequence[int]) -> str:
    """Write the values of the axes."""
    texts = [
        f'<span class="y" style="top:{100 * (1 - axis.at(tick)):.2f}%">{escape(short(tick) + chart.unit)}</span>'
        for tick in _ticks(axis, chart)
    ]
    width = max(1, steps[-1] - steps[0])
    every = max(1, math.ceil(_round(width / 4)))
    inner = [s for s in range(steps[0] - steps[0] % every + every, steps[-1], every) if s - steps[0] > width / 10]
    for s in [
        steps[0],
        *(s for s in inner if steps[-1] - s > width / 8),
        *([steps[-1]] if steps[-1] > steps[0] else []),
    ]:
        place = 100 * (s - steps[0]) / width if len(steps) > 1 else 50
        texts.append(f'<span class="x" style="left:{place:.2f}%">{s:,}</span>')
    return "".join(texts)


def _legend(chart: Chart, series: Sequence[Series]) -> str:
    if len(series) == 1:
        last = next((value for value in reversed(chart.series[0].values) if value is not None), None)
        return "" if last is None else f'<span class="last">{escape(short(last) + chart.unit)}</span>'
    items = (f'<li><i class="{line.color}"></i>{escape(line.name)}</li>' for line in series)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _told(chart: Chart) -> str:
    """Say a chart to those who do not see it."""
    parts = []
    for line in chart.series:
        known = [value for value in line.values if value is not None]
        if known:
            parts.append(f"{line.name} from {short(known[0])}{chart.unit} to {short(known[-1])}{chart.unit}")
    return f"{chart.title} over {len(chart.steps):,} steps: {'; '.join(parts)}"


def _runs(ys: Sequence[float | None]) -> Iterator[list[int]]:
    """Yield stretches of points without a gap."""
    run: list[int] = []
    for i, y in enumerate(ys):
        if y is not None:
            run.append(i)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _line(xs: Sequence[float], ys: Sequence[float | None]) -> str:
    parts = []
    for run in _runs(ys):
        path = "L".join(f"{xs[i]:.1f} {ys[i]:.1f}" for i in run)
        parts.append(f"M{path}" + ("h.01" if len(run) == 1 else ""))  # round ends make a dot of it
    return "".join(parts)


def _area(xs: Sequence[float], ys: Sequence[float | None], floor: Sequence[float]) -> str:
    if len(xs) == 1:  # a bar
        return f"M300 {floor[0]:.1f}V{ys[0]:.1f}H700V{floor[0]:.1f}Z"
    top = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))
    back = "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(reversed(xs), reversed(floor), strict=True))
    return f"M{top}L{back}Z"


def _shown(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in values]

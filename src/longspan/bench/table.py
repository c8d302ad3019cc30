"""Result files as tables, for a terminal and for the documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.bench.figures import FIGURES
from longspan.bench.forecast import outcomes
from longspan.errors import ConfigError

BEGIN, END = "<!-- results: written by `longspan bench table` -->", "<!-- end of results -->"

_COLUMNS = (
    ("system", "system"),
    ("name", "what"),
    ("way", "way"),
    ("memory", "memory"),
    ("tokens", "tokens"),
    ("step_s", "s/step"),
    ("predicted_s", "predicted"),
    ("seconds", "seconds"),
    ("median_ms", "ms"),
    ("p90_ms", "p90 ms"),
    ("kernel_alone_ms", "kernel alone ms"),
    ("share", "share"),
    ("tokens_per_s", "tokens/s"),
    ("peak_gib", "peak GiB"),
    ("predicted_gib", "predicted GiB"),
    ("host_gib", "host GiB"),
    ("losses", "losses"),
    ("state", ""),
)
_LONGEST = 48


def rows_table(content: Mapping[str, Any]) -> str:
    """Return the rows of a result file; columns that are empty everywhere are left out."""
    cells = [{name: _cell(row, name) for name, _ in _COLUMNS} for row in content["rows"]]
    used = [(name, title) for name, title in _COLUMNS if any(row[name] for row in cells)]
    return _aligned([title for _, title in used], [[row[name] for name, _ in used] for row in cells])


def rendered(text: str, results: Path) -> str:
    """Return a page with the tables between its marks made anew from the result files of a folder.

    Raises:
        ConfigError: the page has no place for them.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"The page needs one line {BEGIN} and, after it, one line {END}.")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{after}"


def tables(results: Path) -> str:
    """Return the newest value of each figure, every comparison with others, and what came of the predictions beside the
    folder, from a folder of result files."""
    paths = sorted(results.glob("*.json"), key=_age)
    files = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    parts = [_figures(files)]
    told = results.parent / "predictions.json"
    if told.exists():
        forecast = json.loads(told.read_text(encoding="utf-8"))
        titles, *lines = outcomes(forecast, [content for _, content in files])
        parts += [
            f"Predictions of {forecast['date']}, commit {forecast['commit']}, on {forecast['gpu']}",
            _aligned(titles, lines),
        ]
    for name, content in files:
        rows = content.get("rows")
        if isinstance(rows, list) and any(row.get("system", "longspan") != "longspan" for row in rows):
            title = f"{content['gpus']} x {content['gpu']}, {content['date']}, commit {content['commit']}, `{name}`"
            parts += [f"Against others: {title}", rows_table(content)]
    return "\n\n".join(parts)


def _figures(files: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    lines = []
    for figure, about in FIGURES.items():
        measured = [(content["date"], name, content) for name, content in files if figure in content.get("figures", {})]
        goal = f"{about.goal} {_number(about.limit)}"
        if not measured:
            lines.append([figure, about.meaning, goal, "not measured yet", "", "", ""])
            continue
        date, name, content = max(measured, key=lambda item: item[:2])
        value = content["figures"][figure]
        reached = _number(value) if about.met(value) else f"{_number(value)} (goal not met)"
        lines.append([figure, about.meaning, goal, reached, date, str(content.get("commit", "")), f"`{name}`"])
    return _aligned(["", "figure", "goal", "measured", "date", "commit", "file"], lines)


def _cell(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None or value == "done":
        return ""
    if name == "memory" and "chosen" in row:
        value = f"{value}: {row['chosen']}"
    if isinstance(value, list):
        return " ".join(_number(v) for v in value[:3])
    if isinstance(value, int | float):
        return _number(value)
    text = str(value).replace("|", "/").replace("\n", " ")
    return text if len(text) <= _LONGEST or name == "memory" else text[: _LONGEST - 3] + "..."


def _number(value: float) -> str:
    if isinstance(value, int) or value >= 1e5:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value < 1000 else f"{value:,.1f}"


def _aligned(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(title), 3, *(len(line[i]) for line in lines)) for i, title in enumerate(titles)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (titles, rule, *lines)
    )


def _age(path: Path) -> tuple[str, int]:
    """Return what sorts result files by day, and those of one day by their numbers."""
    found = re.search(r"(\d{4}-\d\d-\d\d)(?:_(\d+))?$", path.stem)
    return (found[1], int(found[2] or 1)) if found else ("", 0)

"""The page of a run as HTML: one file, which asks for nothing else and says nothing that it has not escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

import yaml

from longspan.report.charts import draw
from longspan.report.figures import Comparison, charts, comparisons, figures, unplanned
from longspan.report.story import Story
from longspan.report.words import duration, gib, short


def page(story: Story) -> str:
    """Return the page of a run, whole."""
    style, script = _file("page.css"), _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    parts = [_header(story), _verdict(story), _figures(story), _charts(story), _plan(story), _settings(story)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_name(story))} · longspan</title><style>{style}</style></head>\n"
        f"<body><main>\n{''.join(parts)}{_footer(story)}</main>\n<script>{script}</script></body></html>\n"
    )


def _file(name: str) -> str:
    return resources.files("longspan.report").joinpath(name).read_text(encoding="utf-8")


def _name(story: Story) -> str:
    model = story.config.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    return str(name or story.folder.name)


def _header(story: Story) -> str:
    text = "" if story.facts is None else story.facts.introduction
    text = text.removeprefix(f"{_name(story)}: ")
    about = f"<p>{escape(text)}</p>" if text else ""
    return f'<header><p class="name">longspan training run</p><h1>{escape(_name(story))}</h1>{about}</header>\n'


def _verdict(story: Story) -> str:
    tag = "pre" if story.kind == "failed" else "span"
    detail = f"<{tag}>{escape(story.detail)}</{tag}>" if story.detail else ""
    return f'<div class="verdict {story.kind}" role="status"><strong>{escape(story.verdict)}</strong>{detail}</div>\n'


def _figures(story: Story) -> str:
    items = (
        f"<div><dt>{escape(f.name)}</dt><dd>{escape(f.value)}{f'<small>{escape(f.note)}</small>' if f.note else ''}"
        "</dd></div>"
        for f in figures(story)
    )
    return f'<dl class="figures">{"".join(items)}</dl>\n' if story.rows else ""


def _charts(story: Story) -> str:
    if not story.rows:
        return ""
    return f'<h2>Step by step</h2><div class="charts">{"".join(map(draw, charts(story)))}</div>\n'


def _plan(story: Story) -> str:
    rows = comparisons(story)
    if not rows:
        return f'<h2>Plan and measurement</h2><div class="card"><p>{escape(unplanned(story))}</p></div>\n'
    assert story.facts is not None and story.facts.plan is not None
    plan = story.facts.plan
    causes = [
        _table(title, ("", unit), [(cause, short(value / scale)) for cause, value in _largest(values)])
        for title, unit, values, scale in (
            ("Planned GPU memory by cause", "GiB", plan.gpu_bytes, 2**30),
            ("Planned seconds by cause", "s", plan.seconds, 1.0),
            ("Planned host memory by cause", "GiB per process", plan.host_bytes, 2**30),
        )
        if values
    ]
    reasons = "".join(f"<p>{escape(reason)}</p>" for reason in plan.reasons)
    return (
        f'<h2>Plan and measurement</h2><div class="card scroll">{_compared(rows)}</div>'
        f'<div class="pairs" style="margin-top:14px">{"".join(causes)}</div>'
        f'<details class="card" style="margin-top:14px"><summary>Why the plan is so</summary>{reasons}</details>\n'
    )


def _largest(values: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(((cause, value) for cause, value in values.items() if value), key=lambda item: -item[1])


def _compared(rows: Iterable[Comparison]) -> str:
    body = [(row.name, row.planned, row.measured, row.difference) for row in rows]
    return _rows(("", "planned", "measured", "difference"), body)


def _table(title: str, head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    return f'<div class="card scroll">{_rows((title, *head[1:]), body)}</div>'


def _rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = ("".join(f"<td>{escape(text)}</td>" for text in row) for row in body)
    return (
        f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )


def _settings(story: Story) -> str:
    facts = story.facts
    if facts is None:
        return (
            '<h2>Setting</h2><div class="card"><p>This run left no run.json, so its settings are not known.</p></div>\n'
        )
    data = f'<h2>Data</h2><div class="card"><p>{escape(facts.data or "Nothing was noted of the data.")}</p></div>\n'
    place = facts.machine
    where = [("host", place.host), ("platform", place.platform), ("processes", f"{place.processes} on {place.device}")]
    where += [(d.type, f"{d.name}, {gib(d.memory_bytes)}") for d in place.devices]
    versions = [(name, version or "not installed") for name, version in facts.versions.items()]
    settings = yaml.safe_dump(facts.config, sort_keys=False, allow_unicode=True, width=100)
    return (
        f'{data}<h2>Machine and versions</h2><div class="pairs">{_table("Machine", ("", ""), where)}'
        f"{_table('Versions', ('', ''), versions)}</div>\n"
        f'<h2>Settings</h2><details class="card" open><summary>All settings of the run</summary>'
        f"<pre>{escape(settings)}</pre></details>\n"
    )


def _footer(story: Story) -> str:
    facts = story.facts
    parts = [f"output folder {story.folder}"]
    if facts is not None:
        parts.append(f"started {facts.starts[0] if facts.starts else 'at a time that is not known'}")
        if len(facts.starts) > 1:
            parts.append(f"gone on {len(facts.starts) - 1} times, last {facts.starts[-1]}")
        if facts.end is not None:
            parts.append(f"{facts.end.kind} {facts.end.time}")
    if story.rows:
        parts.append(f"{duration(sum(story.known('step_s')))} in steps")
    if story.torn:
        parts.append(f"{story.torn} lines of metrics.jsonl cannot be read")
    return f"<footer>{escape(' · '.join(parts))}</footer>\n"

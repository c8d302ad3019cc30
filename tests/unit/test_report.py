"""The page of a run: what it says, that it asks for nothing else, and that nothing in a run can become code."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import stories
from longspan.cli import main
from longspan.errors import ConfigError
from longspan.report import PlanFacts, conclude, end_of, read_facts, write_report
from longspan.report.charts import Chart, Series, draw
from longspan.report.facts import Device, Place
from longspan.report.figures import PHASES, charts, comparisons, figures, unplanned
from longspan.report.story import Story
from longspan.report.words import duration, short
from longspan.train.metrics import PHASES as MEASURED


class Page(HTMLParser):
    """Gathers what a browser would act on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def told(folder: Path) -> Page:
    path, _ = write_report(folder)
    return Page(path.read_text())


def story(folder: Path) -> Story:
    return Story.read(folder, read_facts(folder))


def test_a_complete_run(tmp_path: Path) -> None:
    page = told(stories.leave(tmp_path, stories.facts(end=stories.ended()), stories.rows(200)))
    text = " ".join(page.texts)
    for part in (
        "llama-8b",
        "engine fsdp2 on 2 cuda processes",
        "The run ended after step 200 of 200.",
        "1,204 documents",
        "node-7",
        "NVIDIA H200, 139.0 GiB",
        "not installed",
        "keep: auto",
        "layers keep x+O+KV",
        "26,214,400",
    ):
        assert part in text
    assert page.tags.count("figure") == page.tags.count("svg") == 8


def test_nothing_is_asked_from_anywhere(tmp_path: Path) -> None:
    page = told(stories.leave(tmp_path, stories.facts(), stories.rows(70)))
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset", "action", "background")]
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    text = (tmp_path / "report.html").read_text()
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text
    (policy,) = (value for _, value in page.attributes if "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")


BAD = "</title></style></pre><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def test_nothing_in_a_run_becomes_code(tmp_path: Path) -> None:
    facts = stories.facts(
        starts=[BAD],
        introduction=BAD,
        data=BAD,
        config={"model": {"name": BAD}, BAD: BAD, "memory": {"keep": BAD}, "max_steps": BAD},
        versions={BAD: BAD},
        machine=Place(
            host=BAD, platform=BAD, processes=1, device=BAD, devices=[Device(type=BAD, name=BAD, memory_bytes=1)]
        ),
        end=stories.ended("failed", BAD),
    )
    plain = told(stories.leave(tmp_path / "plain", stories.facts(end=stories.ended("failed", "x")), stories.rows(3)))
    plans = [PlanFacts(gpu_bytes={BAD: 1.0}, seconds={BAD: 1.0}, host_bytes={BAD: 1.0}, reasons=[BAD]), None]
    for i, plan in enumerate(plans):
        folder = tmp_path / f"<script>alert({i})<"  # a slash ends a name, so this is as bad as a folder can be
        page = told(stories.leave(folder, facts.model_copy(update={"plan": plan}), stories.rows(3), BAD))
        assert set(page.tags) == set(plain.tags) and page.tags.count("script") == 1
        assert not [name for name, _ in page.attributes if name.startswith("on")]
        assert {name for name, _ in page.attributes} == {name for name, _ in plain.attributes}
        assert BAD in " ".join(page.texts)


def test_a_run_that_was_killed_says_where(tmp_path: Path) -> None:
    steps = stories.rows(37)
    found = story(stories.leave(tmp_path, stories.facts(), steps, '{"step": 38, "lo'))
    assert (found.kind, found.step, found.torn) == ("unknown", 37, 1)
    assert found.verdict == "The run did not end: the last that was seen of it is step 37 of 200."
    assert found.detail == "It was killed, or still runs. The last line of its metrics is torn."
    for kind, text in (("failed", "Step 38: loss nan"), ("stopped", "stopped by SIGTERM after step 37")):
        found = story(stories.leave(tmp_path, stories.facts(end=stories.ended(kind, text)), steps))
        assert kind in found.verdict and "step 37 of 200" in found.verdict and found.detail == text
    assert story(stories.leave(tmp_path, stories.facts(end=stories.ended("failed")), [])).verdict.endswith(
        "first step."
    )


@pytest.mark.parametrize(
    "line", ['{"step": true}', '{"step": "2"}', "[3]", "\0\0", '{"step": NaN}', "{}", "[" * 100_000], ids=range(7)
)
def test_lines_that_are_no_rows(tmp_path: Path, line: str) -> None:
    text = '{"step": 2, "loss": NaN, "lr": Infinity, "tokens": 1e999, "note": "x", "grad_norm": 1' + "0" * 400 + "}"
    folder = stories.leave(tmp_path, None, [{"step": 3, "loss": 2.0}, {"step": 1, "loss": 1.0}], f"{text}\n{line}\n")
    found = story(folder)
    assert [row["step"] for row in found.rows] == [1, 2, 3] and found.torn == 1
    assert dict(found.rows[1]) == {
        "step": 2.0,
        "loss": None,
        "lr": None,
        "tokens": None,
        "note": None,
        "grad_norm": None,
    }
    assert "left no run.json" in " ".join(told(folder).texts)


def test_a_run_record_that_cannot_be_read(tmp_path: Path) -> None:
    folder = stories.leave(tmp_path, stories.facts(), stories.rows(1))
    for text in (
        "{",
        "[]",
        "[" * 100_000,
        '{"run": 1}',
        (folder / "run.json").read_text().replace('"starts": [', '"starts": [{},'),
    ):
        (folder / "run.json").write_text(text)
        with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
            write_report(folder)


def test_a_row_for_every_step_of_a_long_run_stays_small_and_shows_its_spike(tmp_path: Path) -> None:
    steps = stories.rows(20_000)
    steps[12_345]["loss"] = 77.0
    path, _ = write_report(stories.leave(tmp_path, stories.facts(), steps))
    assert path.stat().st_size < 300_000
    points, *_ = (json.loads(v) for name, v in Page(path.read_text()).attributes if name == "data-points")
    assert points[1][points[2].index(77.0)] == 12_346 and len(points[1]) <= 242


def test_planned_beside_measured(tmp_path: Path) -> None:
    steps = [{"step": s, "step_s": t, "gpu_bytes": 96e9, "mfu": 0.5} for s, t in ((1, 90.0), (2, 20.0), (3, 22.0))]
    found = story(stories.leave(tmp_path, stories.facts(), steps))
    rows = {row.name: (row.planned, row.measured, row.difference) for row in comparisons(found)}
    assert rows["GPU memory, peak"] == ("87.5 GiB", "89.4 GiB", "+2.1 %")
    assert rows["Seconds per step, median"] == ("19.2", "21", "+9.4 %")
    assert rows["MFU, causal attention"] == ("47.0 %", "50.0 %", "+6.4 %")
    assert len(rows) == 3
    facts = stories.facts()
    facts.config["gradient_accumulation_steps"] = 4  # the plan is about one micro-batch
    again = story(stories.leave(tmp_path / "more", facts, steps))
    assert [row.name for row in comparisons(again)] == ["GPU memory, peak"]


@pytest.mark.parametrize(
    ("changes", "keep", "said"),
    [
        ({"plan": PlanFacts()}, "x+O", "memory.keep was set to x+O"),
        ({"plan": PlanFacts(), "machine": None}, "auto", "On CPUs the plan predicts nothing"),
        ({"plan": None}, "auto", "predicted nothing for this run"),
    ],
)
def test_runs_without_a_prediction_say_so(tmp_path: Path, changes: dict[str, Any], keep: str, said: str) -> None:
    facts = stories.facts()
    if "machine" in changes:
        changes = {**changes, "machine": facts.machine.model_copy(update={"device": "cpu"})}
    facts = facts.model_copy(update={**changes, "config": {**facts.config, "memory": {"keep": keep}}})
    folder = stories.leave(tmp_path, facts, stories.rows(2))
    assert said in unplanned(story(folder)) and said in " ".join(told(folder).texts)


def test_key_figures(tmp_path: Path) -> None:
    steps = [
        {
            "step": s,
            "loss": 3.0 - s,
            "grad_norm": 1.0,
            "step_s": 2.0,
            "tokens": 10,
            "tokens_per_s": v,
            "exchange_s": 0.5,
            "mfu": None,
        }
        for s, v in ((1, 1.0), (2, 5.0), (3, 7.0))
    ]
    shown = {f.name: (f.value, f.note) for f in figures(story(stories.leave(tmp_path, None, steps)))}
    assert shown["Loss"] == ("0", "from 2") and shown["Tokens"] == ("30", "3 steps in 6s")
    assert shown["Tokens per second"][0] == "6" and shown["Waiting for exchanges"][0] == "25.0 %"
    assert not {"MFU", "GPU memory", "Skipped steps"} & set(shown)
    steps[1] |= {"loss": None, "skipped": True}
    shown = {f.name: f.value for f in figures(story(stories.leave(tmp_path, None, steps)))}
    assert shown["Skipped steps"] == "1" and shown["Loss"] == "0"


def test_a_long_loss_is_smoothed_around_each_step(tmp_path: Path) -> None:
    steps = [{"step": s, "loss": float(s % 2) + (s == 40) * 3} for s in range(1, 91)]
    loss, mean = charts(story(stories.leave(tmp_path, None, steps)))[0].series
    assert mean.name == "mean of 3 steps" and loss.values[39] == 3.0
    assert mean.values[38:41] == [(0 + 1 + 3) / 3, (1 + 3 + 1) / 3, (3 + 1 + 0) / 3] and mean.values[0] == 0.5
    assert len(charts(story(stories.leave(tmp_path, None, steps[:59])))[0].series) == 1


def test_the_page_knows_every_phase_that_is_measured() -> None:
    assert tuple(PHASES) == MEASURED


def chart(values: list[float | None], **options: Any) -> str:
    return draw(Chart("T", list(range(1, len(values) + 1)), [Series("s", values, "a")], **options))


def test_lines_lie_where_their_values_are() -> None:
    drawn = chart([0.0, 5.0, 10.0])  # the axis ends 6 % above the highest
    assert 'class="line a" d="M0.0 1000.0L500.0 528.3L1000.0 56.6"' in drawn
    assert 'style="top:100.00%">0<' in drawn and 'style="top:52.83%">5<' in drawn
    gap = chart([1.0, 2.0, None, 1.5], zero=False)  # 6 % more on either side
    assert 'class="line a" d="M0.0 946.4L333.3 53.6M1000.0 500.0h.01"' in gap and "null" in gap


def test_a_logarithmic_axis() -> None:
    drawn = chart([1.0, 10.0, 100.0, 0.0], logarithmic=True)
    low, high = math.log10(1 / 1.3), math.log10(130)
    assert f"L333.3 {1000 * (1 - (1 - low) / (high - low)):.1f}" in drawn
    assert all(f">{tick}<" in drawn for tick in (1, 10, 100)) and drawn.count("L") == 2


def test_layers_lie_on_each_other() -> None:
    layers = [Series("low", [1.0, 2.0], "a"), Series("high", [3.0, None], "b")]
    drawn = draw(Chart("T", [1, 2], layers, stacked=True))
    assert 'class="area a" d="M0.0 764.2L1000.0 528.3L1000.0 1000.0L0.0 1000.0Z"' in drawn
    assert 'class="area b" d="M0.0 56.6L1000.0 528.3L1000.0 528.3L0.0 764.2Z"' in drawn


@pytest.mark.parametrize("values", [[1.0], [0.0], [0.0, 0.0], [3.0, 3.0], [-2.0, -1.0], [1e-9, 2e-9], [1e12, 3e12]])
@pytest.mark.parametrize("options", [{}, {"zero": False}, {"logarithmic": True}, {"stacked": True}])
def test_any_values_can_be_drawn(values: list[float | None], options: dict[str, bool]) -> None:
    drawn = chart(values, **options)
    assert "nan" not in drawn and "inf" not in drawn and drawn.count("<svg") == 1


def test_numbers_as_people_read_them() -> None:
    numbers = {0.0: "0", 0.01234: "0.01234", 1.23456: "1.235", 12345.6: "12,346", 2e-5: "2e-05", 5.0: "5", -0.5: "-0.5"}
    assert {value: short(value) for value in numbers} == numbers
    assert [duration(s) for s in (42, 187, 7500)] == ["42s", "3m07s", "2h05m"]


def test_a_page_that_cannot_be_written_takes_nothing_from_the_run(tmp_path: Path) -> None:
    facts = stories.facts()
    assert conclude(tmp_path, facts, end_of(None, None)) == f"report: {tmp_path / 'report.html'}"
    found = read_facts(tmp_path)
    assert found is not None and found.end is not None and found.end.kind == "ended"

    (tmp_path / ".report.html.partial").mkdir()  # stands in the way
    said = conclude(tmp_path, facts, end_of(ValueError("x"), None))
    assert said.startswith(f"There is no report.html: Cannot write {tmp_path / 'report.html'}: [Errno 21]")
    found = read_facts(tmp_path)
    assert found is not None and found.end is not None and (found.end.kind, found.end.text) == ("failed", "x")


def test_how_a_run_ends() -> None:
    assert end_of(KeyboardInterrupt(), None).kind == "stopped"
    assert (end_of(None, "told to").kind, end_of(None, "told to").text) == ("stopped", "told to")
    assert end_of(RuntimeError(), None).text == "RuntimeError"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stories.leave(tmp_path / "out", stories.facts(), stories.rows(5), '{"st')
    for flags in ([], ["--json"]):
        with pytest.raises(SystemExit) as exit:
            main(["report", str(folder), *flags])
        assert exit.value.code == 0
    plain, page, line = capsys.readouterr().out.splitlines()
    assert plain.startswith("The run did not end") and page == f"report: {folder / 'report.html'}"
    assert json.loads(line) == {"report": str(folder / "report.html"), "verdict": plain}
    (tmp_path / "empty").mkdir()
    for name, said in (("none", "is not a folder"), ("empty", "neither run.json nor metrics.jsonl")):
        with pytest.raises(SystemExit) as exit:
            main(["report", str(tmp_path / name)])
        assert exit.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("stacked", [False, True])
def test_nothing_in_a_chart_becomes_code(stacked: bool) -> None:
    lines = [Series(BAD, [1.0, 2.0], "a"), Series(BAD, [2.0, 3.0], "b")]
    for series in (lines, lines[:1]):
        page = Page(draw(Chart(BAD, [1, 2], series, unit=BAD, note=BAD, stacked=stacked)))
        assert set(page.tags) <= {"figure", "figcaption", "h3", "p", "ul", "li", "i", "div", "svg", "path", "span"}
        assert not [name for name, _ in page.attributes if name.startswith("on")]

"""Result files, the figures that follow from them, their tables, and the search for the longest row."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.bench.figures import FIGURES, figures_of
from longspan.bench.fit import search
from longspan.bench.forecast import outcomes
from longspan.bench.results import Results, Target
from longspan.bench.settings import Setting, Work, settings_of
from longspan.bench.table import BEGIN, END, rendered, rows_table, tables
from longspan.errors import ConfigError

CPU = torch.device("cpu")


def content(what: str, gpus: int, *rows: dict[str, Any], gpu: str = "NVIDIA H200", **work: Any) -> dict[str, Any]:
    asked = {"work": {"model": "llama-8b", "layers": None, "host_memory_bytes": 128 << 30, **work}}
    return {"what": what, "gpu": gpu, "gpus": gpus, "asked": asked, "rows": [{"state": "done", **row} for row in rows]}


STEP_131K = {"tokens": 131072, "step_s": 18.9}


@pytest.mark.parametrize(
    ("measured", "figures"),
    [
        (content("step", 2, STEP_131K, {"tokens": 131072, "step_s": 20.0}), {"P1": 18.9}),
        (content("step", 2, {"tokens": 32768, "step_s": 2.2}, STEP_131K), {"P1": 18.9, "P2": 2.2}),
        (content("step", 2, {"tokens": 786432, "step_s": 500.0}), {"P5": 786432}),
        (content("step", 1, STEP_131K), {}),
        (content("step", 2, STEP_131K, gpu="NVIDIA H100"), {}),
        (content("step", 2, STEP_131K, model="llama-1b"), {}),
        (content("step", 2, STEP_131K, layers=4), {}),
        (content("step", 2, STEP_131K, engine="fsdp2"), {"P1": 18.9}),
        (content("step", 2, STEP_131K, engine="zero-3"), {}),
        (content("step", 2, STEP_131K, adapter={"rank": 16}), {}),
        (content("step", 2, {**STEP_131K, "state": "out of memory"}), {}),
        (content("step", 2, {**STEP_131K, "system": "ringmaster"}), {}),
        (content("fit", 2, {"tokens": 3 << 20}, {"tokens": 1 << 20}), {"P3": 3 << 20}),
        (content("fit", 1, {"tokens": 1 << 20}), {"P4": 1 << 20}),
        (content("fit", 1, {"tokens": 1 << 20}, host_memory_bytes=129 << 30), {}),
        (content("exchange", 2, {"figure": "P7", "value": 1.5}, {"figure": "P7", "value": 0.7}), {"P7": 0.7}),
        (content("attention", 2, {"figure": "P6", "value": 0.98}, {"figure": "P6", "value": 0.9}), {"P6": 0.98}),
        (content("attention", 4, {"figure": "P6", "value": 0.98}), {}),
    ],
)
def test_figures_are_those_of_their_configuration(measured: dict[str, Any], figures: dict[str, float]) -> None:
    assert figures_of(measured) == figures


def test_goals_have_a_direction() -> None:
    assert FIGURES["P1"].met(19.0) and FIGURES["P1"].met(18.0) and not FIGURES["P1"].met(19.1)
    assert FIGURES["P3"].met(3 << 20) and not FIGURES["P3"].met(1 << 20)


def test_a_file_is_whole_after_every_row_and_never_written_over(tmp_path: Path) -> None:
    target = Target(str(tmp_path / "new"), "abc1234", "longspan bench step")
    results = Results.open(target, "step", {"work": {}}, CPU)
    assert results.path is not None
    assert results.path == tmp_path / "new" / f"step_cpu_{time.strftime('%Y-%m-%d')}.json"
    row = results.begin({"tokens": 5})
    on_disk = json.loads(results.path.read_text())
    assert on_disk["rows"] == [{"tokens": 5, "state": "running"}]
    assert {"what", "gpu", "gpus", "torch", "transformers", "commit", "date", "figures", "gates"} <= set(on_disk)
    assert (on_disk["commit"], on_disk["command"], on_disk["gpu"]) == ("abc1234", "longspan bench step", "cpu")
    row["step_s"] = 1.0
    assert results.end_running("killed") is row
    assert results.end_running("killed") is None
    assert Results.load(results.path).rows == [{"tokens": 5, "state": "killed", "step_s": 1.0}]
    second = Results.open(target, "step", {"work": {}}, CPU)
    assert second.path is not None and second.path.name.endswith("-2.json")
    assert not list(tmp_path.rglob("*.part*"))


def test_processes_that_follow_each_other_add_to_one_file(tmp_path: Path) -> None:
    target = Target(str(tmp_path), pointer=str(tmp_path / "pointer"))
    first = Results.open(target, "fit", {}, CPU)
    first.begin({"tokens": 5})
    first.end_running("done")
    second = Results.open(target, "fit", {}, CPU)
    second.begin({"tokens": 6})
    assert second.path == first.path
    assert [row["tokens"] for row in second.rows] == [5, 6]


def test_tables_show_the_newest_figure_and_comparisons(tmp_path: Path) -> None:
    row = {"system": "longspan", "memory": "auto", "chosen": "8/x/-", "tokens": 131072, "losses": [12.5]}
    rival = {"system": "DeepSpeed ALST", "state": "not installed: no module deepspeed"}
    for date, value, rows in (("2026-12-01", 18.91, [row, rival]), ("2026-11-01", 25.0, [row])):
        about = {"date": date, "commit": f"c{value}", "gpu": "NVIDIA H200", "gpus": 2, "figures": {"P1": value}}
        (tmp_path / f"step_{date}.json").write_text(json.dumps({**about, "rows": rows}))
    found = tables(tmp_path)
    assert "| 18.91 " in found
    assert "25 (goal" not in found
    assert found.count("Against others") == 1
    assert "auto: 8/x/-" in found and "131,072" in found and "not installed: no module deepspeed" in found
    page = f"before\n{BEGIN}\nold\n{END}\nafter"
    once = rendered(page, tmp_path)
    assert once.startswith("before\n") and once.endswith("\nafter") and "old" not in once
    assert rendered(once, tmp_path) == once
    with pytest.raises(ConfigError, match="needs one line"):
        rendered("nothing", tmp_path)


def test_predictions_stand_beside_what_was_measured_later() -> None:
    told = {"model": "m", "gpus": 2, "tokens": 1024, "lora_rank": 16, "held_out": True}
    forecast = {
        "gpu": "NVIDIA H200",
        "date": "2026-12-01",
        "rows": [{**told, "predicted_s": 1.1, "predicted_gib": 9.0}],
    }
    row = {"memory": "auto", "tokens": 1024, "state": "done", "step_s": 1.0, "peak_gib": 10.0}

    def measured(date: str, row: dict[str, Any], **work: Any) -> dict[str, Any]:
        work = {"model": "m", "layers": None, "adapter": {"rank": 16}} | work
        return {"what": "step", "gpu": "NVIDIA H200", "gpus": 2, "date": date, "asked": {"work": work}, "rows": [row]}

    fits = measured("2026-12-02", row)
    assert outcomes(forecast, [fits])[1] == [
        "m", "2", "1,024", "rank 16", "yes", "1.1", "1", "+10.0 %", "9", "10", "-10.0 %",
    ]  # fmt: skip
    for other in (
        measured("2026-12-01", row),
        measured("2026-12-02", row, adapter=None),
        measured("2026-12-02", row, layers=4),
        measured("2026-12-02", row, ulysses=2),
        measured("2026-12-02", row, ring=2),
        measured("2026-12-02", row, engine="zero-3"),
        measured("2026-12-02", {**row, "memory": "8/x/-"}),
        measured("2026-12-02", {**row, "state": "out of memory"}),
        {**fits, "gpus": 1},
        {**fits, "gpu": "NVIDIA H100"},
    ):
        assert outcomes(forecast, [other])[1].count("not measured") == 2


def test_a_table_leaves_out_what_nobody_measured_and_shows_why() -> None:
    rows = [{"name": "dense", "share": 0.5, "state": "done"}, {"name": "packed", "state": "gate failed: out | is off"}]
    lines = rows_table({"rows": rows}).splitlines()
    assert lines[0].split() == ["|", "what", "|", "share", "|", "|"]
    assert "gate failed: out / is off" in lines[3]


@pytest.mark.parametrize(("longest", "start"), [(100_000, 10_000), (9_000, 40_000), (1_000_000, 65_536), (40, 64)])
def test_the_search_finds_the_longest_row(longest: int, start: int) -> None:
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= longest

    found = search(fits, start, step_tokens=1024)
    assert len(tried) == len(set(tried)) < 25
    if longest < 1024:
        assert found is None or found <= longest
    else:
        assert found is not None
        assert longest * 15 / 17 - 1024 <= found <= longest


def test_the_search_ends_with_its_time() -> None:
    answers = iter([True, True, None])
    assert search(lambda tokens: next(answers), 1000) == 2000


def test_settings_can_be_restricted_to_lengths() -> None:
    found = settings_of(["8/x/-@4,6", "auto", "auto"], [5, 7])
    assert found == (Setting("8/x/-", 4), Setting("8/x/-", 6), Setting("auto", 5), Setting("auto", 7))
    with pytest.raises(ConfigError, match="after @ come numbers of tokens"):
        settings_of(["8/x/-@4K"], [5])
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        settings_of(["auto"], [1])


def test_one_process_with_its_optimizer_on_the_host_needs_no_engine() -> None:
    assert Work("m", 1, optimizer="adamw-host").chosen_engine == "single"
    assert Work("m", 1, optimizer="adamw-host").in_backward
    assert Work("m", 1).chosen_engine == Work("m", 2, optimizer="adamw-host").chosen_engine == "fsdp2"
    assert not Work("m", 1, optimizer="adamw-host", engine="fsdp2").in_backward
    with pytest.raises(ConfigError, match="--engine must be"):
        Work("m", 1, engine="zero3")

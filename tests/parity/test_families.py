"""Every family, divided and run in every way, against the plain model on each document alone, in fp64.

Each way is judged by the loss, all gradients, evaluation, and a token that is changed in one document: its own logits
move, those of every other document stay as they are, bit for bit (with experts, within rounding).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from typing import Any

import pytest
import torch
import transformers as hf

import longspan
from families import FAMILIES, PAGE, REFUSED, Family, rendered
from longspan.check.row import COLUMNS, WAYS, Cell, cells, check_ways, row
from longspan.check.settings import Settings
from longspan.errors import ModelError
from longspan.integrations.presets import preset_config
from pool import RunRanks
from test_check import no_borders, wrong_engine, wrong_tiles

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
MISTAKES = {"packed": no_borders, "streamed": wrong_tiles, "engine": wrong_engine}


def ways_of(preset: str, overrides: Mapping[str, Any], sp: int, mistake: str | None = None) -> Any:
    with MISTAKES[mistake]() if mistake else nullcontext():
        return check_ways(preset_config(preset, **overrides), Settings(preset, sp), sp)


def found_by(run_ranks: RunRanks, family: Family) -> list[dict[str, Any]]:
    found = []
    for sp in sorted({way.sp for way in WAYS}):
        found += run_ranks(sp, ways_of, family.preset, family.overrides, sp)[0]
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_family_is_what_its_row_says(run_ranks: RunRanks, family: Family) -> None:
    found = found_by(run_ranks, family)
    made = cells(found)
    for column, declared in family.cells().items():
        assert made[column].said == declared.said, row(family.name, family.preset, made)
        assert declared.why in made[column].why
    for case in (case for way in found for case in way.get("cases", ())):
        errors = {name: case[f"{name}_rel_err"] for name in ("loss", "grad", "eval")}
        assert max(errors.values()) <= TOLERANCE, (case["name"], errors, case["worst_parameter"])


@pytest.mark.parametrize("column", MISTAKES)
def test_a_mistake_shows_in_its_column(run_ranks: RunRanks, column: str) -> None:
    made = cells(run_ranks(2, ways_of, "tiny-llama", {}, 2, column)[0])
    assert made[column].said == "FAILED"
    assert made["ring"].exact


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_layer(name: str) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(REFUSED[name].config(), attn_implementation="eager")
    with redirect_stderr(io.StringIO()), pytest.raises(ModelError) as refusal:
        longspan.prepare(model)
    assert str(refusal.value).startswith(REFUSED[name].says)


def test_the_page_says_what_is_declared() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page, "run `PYTHONPATH=src:tests/parity python tests/parity/families.py`"


def test_a_cell_says_the_worst_that_was_found() -> None:
    fine = {"name": "packed 2x1", "why": []}
    wrong = {"name": "document 2x1", "why": ["leak 3 exceeds 0"]}
    said = cells([{"way": 0, "cases": [fine, wrong]}, {"way": 1, "refused": "no | ring"}])
    assert said["ulysses"] == Cell("FAILED", "document 2x1: leak 3 exceeds 0")
    assert said["ring"] == said["packed"] == Cell("refused", "no | ring")
    assert said["hybrid"] == Cell("FAILED", "not checked")
    assert "| refused (no / ring) |" in row("M", "m", said)
    same = {column: Cell("refused", "so") for column in COLUMNS}
    assert row("M", "m", same) == "| M | `m` | refused (so) | refused | refused | refused | refused | refused |"

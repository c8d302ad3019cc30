"""The tables of the documentation are those of the result files, and the files say where they come from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from longspan.bench.figures import FIGURES
from longspan.bench.table import rendered

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_tables_are_those_of_the_files() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert rendered(page, RESULTS) == page, "run `longspan bench table`"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*")), ids=lambda path: path.name)
def test_every_file_says_when_and_with_what_it_was_measured(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["torch"]
    if "figures" in content:
        assert re.fullmatch(r"[0-9a-f]{7,40}", content["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
        assert set(content["figures"]) <= set(FIGURES)
        assert all(isinstance(value, int | float) for value in content["figures"].values())
    for row in content.get("rows", ()) if "gates" in content else ():
        assert "step_s" not in row or row.get("system") != "longspan" or content["gates"][row["gate"]]["ok"]

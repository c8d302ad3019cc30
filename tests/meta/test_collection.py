"""The test command runs all tests, and the linter reads them: none lies in a folder that is left out."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_every_folder_of_tests_is_entered(pytestconfig: pytest.Config) -> None:
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert {Path("dist"), Path("unit")} <= folders
    assert pytestconfig.getini("testpaths") == ["tests"]
    unseen = [str(f) for f in folders if any(fnmatch(part, pattern) for part in f.parts for pattern in left_out)]
    assert not unseen


def test_every_folder_of_tests_is_linted() -> None:
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    left_out = settings["exclude"]  # in place of ruff's own list, which names dist
    files = [path.relative_to(TESTS.parent) for path in TESTS.rglob("*.py")]
    assert not [f for f in files if any(fnmatch(part, pattern) for part in f.parts for pattern in left_out)]

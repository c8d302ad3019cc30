"""The test command runs all tests: none lies in a folder that pytest leaves out."""

from __future__ import annotations

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

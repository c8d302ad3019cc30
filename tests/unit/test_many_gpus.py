"""The runs for many GPUs are commands that exist, whatever the number of GPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import typer.main

from longspan.cli.app import app

FILE = Path(__file__).parents[2] / "benchmarks" / "many_gpus.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("many_gpus", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_commands_are_understood(script: Any, gpus: int) -> None:
    """The command line parses each of them; nothing is run."""
    root: Any = typer.main.get_command(app)
    for run in script.RUNS.values():
        for small in (False, True):
            for words in run(gpus, small):
                command, rest = root.commands[words[0]], list(words[1:])
                while hasattr(command, "commands"):
                    command = command.commands[rest.pop(0)]
                assert command.make_context(words[0], [*rest]).params


def test_degrees_are_all_there_are(script: Any) -> None:
    assert list(script.degrees(8)) == [(8, 1), (4, 2), (2, 4), (1, 8)]
    asked = [" ".join(words) for words in script.correct(8, False)]
    assert any("--sp 3 " in words for words in asked) and any("--sp 6 " in words for words in asked)
    for gpus, pair in ((2, (2, 1)), (4, (2, 2)), (8, (4, 2))):
        (words,) = script.both(gpus, False)
        assert words[-4:] == ["--ulysses", str(pair[0]), "--ring", str(pair[1])]

"""Over budget means a missing noun: files, functions and parameter lists stay small, and every test asserts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
FILE_LINES, FUNCTION_LINES, PARAMETERS = 400, 60, 8
PUBLISHED = {"prepare", "attend", "plan", "sequence_tiled_compute"}
"""Functions whose parameters are promised to users, one keyword each, by us or by what they take the place of."""

FORBIDDEN = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(file: Path) -> list[Function]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, Function)]


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", SOURCE, ids=name)
def test_source_budgets(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= FILE_LINES
    assert not FORBIDDEN.search(text)
    assert not re.search(r"manager|helper|utils|common", file.stem)
    for function in functions(file):
        place = f"{name(file)}:{function.lineno} {function.name}"
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno + 1 <= FUNCTION_LINES, place
        arguments = function.args
        count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls", "ctx")
        assert count <= PARAMETERS or function.name in PUBLISHED, place


@pytest.mark.parametrize("file", SOURCE, ids=name)
def test_modules_and_public_functions_say_what_they_do(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree) or not tree.body, f"{name(file)} has no docstring"
    for node in tree.body:
        overload = isinstance(node, Function) and any("overload" in ast.unparse(d) for d in node.decorator_list)
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not overload:
            assert ast.get_docstring(node), f"{name(file)}:{node.lineno} {node.name} has no docstring"


@pytest.mark.parametrize("file", TESTS, ids=name)
def test_every_test_can_fail(file: Path) -> None:
    for function in functions(file):
        if function.name.startswith("test_"):
            body = ast.unparse(function)
            assert re.search(r"assert|raises|warns|check|expect|run_ranks\(", body), f"{function.name} asserts nothing"

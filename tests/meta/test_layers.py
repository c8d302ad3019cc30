"""Layers import downwards only, and only the border knows other people's frameworks."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "longspan"
LAYERS = [
    {
        "errors",
        "files",
        "config",
        "keep",
        "layout",
        "mask",
        "segments",
        "needs",
        "documents",
        "overrides",
        "versions",
        "weights",
    },
    {"agreement", "plan", "mesh", "once", "stopwatch", "comm", "kernels"},
    {
        "attention",
        "recurrent",
        "stream",
        "tiling",
        "tiled",
        "mlp",
        "host",
        "offload",
        "loss",
        "batch",
        "images",
        "loader",
    },
    {"integrations", "engines", "optim"},
    {"train", "cli", "report", "check", "bench", "evaluate", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FRAMEWORKS = {"transformers", "accelerate", "peft", "deepspeed", "trl", "twinkle", "tokenizers"}
FILES = sorted(SOURCE.rglob("*.py"))


def part(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: import by the full name"
            assert node.module
            if node.module == "longspan":
                yield from (f"longspan.{alias.name}" for alias in node.names)
            yield node.module


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_downwards(file: Path) -> None:
    if file == SOURCE / "__init__.py":
        return
    assert part(file) in LEVEL, f"{file.name}: say in LAYERS where it belongs"
    for name in imports(file):
        head, _, rest = name.partition(".")
        if head == "longspan" and rest:
            below = rest.split(".")[0]
            assert LEVEL.get(below, 9) <= LEVEL[part(file)], f"{part(file)} must not import longspan.{below}"
        if head in FRAMEWORKS:
            assert part(file) == "integrations", f"{head} is imported in integrations only"


def test_importing_longspan_loads_no_framework_and_touches_no_gpu() -> None:
    code = (
        "import sys, longspan, torch\n"
        f"loaded = sorted(set(sys.modules) & {FRAMEWORKS!r})\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_environment_variables_below_the_command_line() -> None:
    for file in FILES:
        if part(file) == "cli":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            assert not read, f"{file}:{getattr(node, 'lineno', 0)}: environment variables belong to cli"


def test_no_module_state() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.Global), f"{file}:{node.lineno}: no module globals"

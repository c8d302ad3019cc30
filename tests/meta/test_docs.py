"""What the documents show is true: code compiles, settings exist, files are where the text says."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

import longspan
from longspan.config import load_config, parse_config
from longspan.plan.library import read_machines

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> list[str]:
    return [textwrap.dedent(body) for _, kind, body in BLOCK.findall(page.read_text()) if kind == language]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_compiles_and_uses_public_names(page: Path) -> None:
    for code in blocks(page, "python"):
        compile(code, name(page), "exec")
        for attribute in re.findall(r"\blongspan\.(\w+)\(", code):
            assert attribute in longspan.__all__, f"{name(page)}: longspan.{attribute} is not public"


def run(page: str) -> dict[str, Any]:
    """Run all Python code of a page, in order, and return its names."""
    names: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / page, "python"):
        exec(compile(code, page, "exec"), names)
    return names


def test_tools_do_what_their_page_shows() -> None:
    assert run("tools.md")["handle"]


def test_tiers_hold_what_their_page_shows() -> None:
    held = run("choosing.md")["held"]
    assert 0 < held["gpu"] <= 200_000 and 0 < held["host"] <= 150_000 and held["file"] > 0


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_yaml_is_valid(page: Path) -> None:
    for text in blocks(page, "yaml"):
        if "gemm_tflops" in text:
            assert read_machines(text, page.name)
        else:
            assert parse_config(yaml.safe_load(text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{name(page)}: {target} does not exist"


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=name)
def test_examples_are_valid(file: Path) -> None:
    assert load_config(file).max_steps > 0


def test_the_tree_in_the_readme_exists() -> None:
    (tree,) = (body for body in blocks(ROOT / "README.md", "text") if "src/longspan/" in body)
    folder = ""
    for line in tree.splitlines():
        path = line.split("  ")[0] if not line.startswith(" ") else folder + line.split()[0]
        if not line.startswith(" ") and path.endswith("/"):
            folder = path
        assert (ROOT / path.strip()).exists(), path

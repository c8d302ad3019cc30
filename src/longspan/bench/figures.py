"""The figures that are compared from version to version: what each is, its goal, and which measurement gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_GPU = "H200"
_MODEL = "llama-8b"


@dataclass(frozen=True)
class Figure:
    """A number with a goal.

    Args:
        meaning: of one line, with the unit.
        goal: `at most` or `at least` so much.
    """

    meaning: str
    goal: str
    limit: float

    def met(self, value: float) -> bool:
        """Whether a value reaches the goal."""
        return value == self.limit or self.better(value, self.limit)

    def better(self, value: float, other: float) -> bool:
        """Whether a value is better than another."""
        return value < other if self.goal == "at most" else value > other


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "P1": Figure("seconds per step at 131,072 tokens, 2 GPUs", "at most", 19.0),
        "P2": Figure("seconds per step at 32,768 tokens, 2 GPUs", "at most", 2.3),
        "P3": Figure("longest row that fits, tokens, 2 GPUs with 256 GiB of host memory", "at least", 3 << 20),
        "P4": Figure("longest row that fits, tokens, 1 GPU with 128 GiB of host memory", "at least", 1.2e6),
        "P5": Figure("longest row of a whole step that was run, tokens, 2 GPUs", "at least", 786_432),
        "P6": Figure("attention over 2 GPUs, dense: share of the kernel's own rate", "at least", 0.97),
        "P6_packed": Figure("attention over 2 GPUs, packed: share of the kernel's own rate", "at least", 0.93),
        "P7": Figure("milliseconds of an exchange of heads, 512 MiB per GPU, 2 GPUs", "at most", 0.75),
        "P8": Figure("step time of 2 CPU processes over that of 1", "at most", 0.6),
    }
)
"""All but P8 are of an NVIDIA H200; P1 to P5 of full fine-tuning of the Llama-3-8B shape with AdamW, one row a step,
under longspan's own engines."""


def figures_of(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures that a file's rows give; none for other models, GPUs or numbers of them.

    Args:
        content: of a result file.
    """
    if _GPU not in content.get("gpu", ""):
        return {}
    what, rows = content["what"], [row for row in content["rows"] if row["state"] == "done"]
    if what in ("exchange", "attention"):
        return _of_parts(rows) if content["gpus"] == 2 else {}
    work = content["asked"]["work"]
    ours = [row for row in rows if row.get("system", "longspan") == "longspan"]
    whole = work["layers"] is None and work.get("adapter") is None and not work.get("engine", "").startswith("zero")
    if work["model"] != _MODEL or not whole or not ours:
        return {}
    gpus = content["gpus"]
    if what == "step" and gpus == 2:
        return _of_steps(ours)
    if what == "fit" and gpus in (1, 2) and work["host_memory_bytes"] <= (128 << 30) * gpus:
        return {"P3" if gpus == 2 else "P4": max(row["tokens"] for row in ours)}
    return {}


def _of_steps(rows: list[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, tokens in (("P1", 131_072), ("P2", 32_768)):
        times = [row["step_s"] for row in rows if row["tokens"] == tokens]
        if times:
            found[name] = min(times)
    longest = max(row["tokens"] for row in rows)
    return found | ({"P5": longest} if longest > 131_072 else {})


def _of_parts(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the best value of each figure: of several ways the best is the one that is used."""
    found: dict[str, float] = {}
    for row in rows:
        name = row.get("figure", "")
        if name in FIGURES and (name not in found or FIGURES[name].better(row["value"], found[name])):
            found[name] = row["value"]
    return found

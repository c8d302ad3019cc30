"""What a run's files tell: its steps, its facts, and how far it came."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import ConfigError
from longspan.report.facts import METRICS, Facts

Values = Mapping[str, float | None]


@dataclass(frozen=True)
class Story:
    """A run as its files tell it.

    Args:
        folder: output folder.
        facts: None for a run without run.json, as of an earlier version.
        rows: of metrics.jsonl, by step; what is not a finite number is None.
        torn: lines that are no rows, as a machine that went down may leave the last one.
    """

    folder: Path
    facts: Facts | None
    rows: Sequence[Values]
    torn: int

    @classmethod
    def read(cls, folder: Path, facts: Facts | None) -> Story:
        """Read the steps of a run.

        Raises:
            ConfigError: they cannot be read.
        """
        path, torn = folder / METRICS, 0
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}.") from None
        rows: dict[int, Values] = {}
        for line in lines:
            row = _row(line)
            torn += row is None
            if row is not None:
                rows[int(row["step"] or 0)] = row
        return cls(folder, facts, [rows[step] for step in sorted(rows)], torn)

    @property
    def config(self) -> Mapping[str, Any]:
        """Settings of the run; empty where they are not known."""
        return {} if self.facts is None else self.facts.config

    @property
    def max_steps(self) -> int | None:
        """Steps that the run was to take."""
        found = self.config.get("max_steps")
        return found if isinstance(found, int) else None

    @property
    def kind(self) -> str:
        """How the run ended: `ended`, `stopped`, `failed`, or `unknown`."""
        return "unknown" if self.facts is None or self.facts.end is None else self.facts.end.kind

    @property
    def verdict(self) -> str:
        """How the run ended, and where, in a sentence."""
        of = "" if self.max_steps is None else f" of {self.max_steps:,}"
        if not self.rows:
            return {
                "ended": "The run had no step left to take.",
                "unknown": "The run did not end: it left no step.",
            }.get(self.kind, f"The run {'failed' if self.kind == 'failed' else 'was stopped'} before its first step.")
        where = f"step {self.step:,}{of}"
        return {
            "ended": f"The run ended after {where}.",
            "stopped": f"The run was stopped after {where}.",
            "failed": f"The run failed; the last step that was recorded is {where}.",
        }.get(self.kind, f"The run did not end: the last that was seen of it is {where}.")

    @property
    def detail(self) -> str:
        """What more there is to say about the end; empty where all went well."""
        end = None if self.facts is None else self.facts.end
        if end is not None:
            return "" if end.kind == "ended" else end.text
        known = "" if self.facts is None else "It was killed, or still runs. "
        return f"{known}{'The last line of its metrics is torn.' if self.torn else ''}".strip()

    @property
    def step(self) -> int:
        """The last step that was recorded; 0 where there is none."""
        return int(self.rows[-1]["step"] or 0) if self.rows else 0

    def column(self, name: str) -> list[float | None]:
        """Return a figure of every step."""
        return [row.get(name) for row in self.rows]

    def known(self, name: str) -> list[float]:
        """Return a figure of the steps that have it."""
        return [value for value in self.column(name) if value is not None]

    def median(self, name: str) -> float | None:
        """Return the median of a figure, the first step left out where there are others: it warms up."""
        values = self.column(name)
        values = [value for value in (values[1:] if len(values) > 1 else values) if value is not None]
        return statistics.median(values) if values else None

    def largest(self, name: str) -> float | None:
        """Return the largest of a figure."""
        return max(self.known(name), default=None)


def _row(line: bytes) -> Values | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or _number(found.get("step")) is None:
        return None
    return {str(name): _number(value) for name, value in found.items()}


def _number(value: Any) -> float | None:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if real and math.isfinite(value) else None
    except OverflowError:
        return None

"""Count what became of documents, and say which cannot be used, several at once."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from longspan.errors import DataError

_SHOWN_PROBLEMS = 8
_SHOWN_EXAMPLES = 3
_KINDS = 20
_NUMBER = re.compile(r"\d[\d,]*")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass
class Tally:
    """How many documents, or pieces of them, met the same fate, and the first of them by name."""

    count: int = 0
    tokens: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, name: str, tokens: int = 0) -> None:
        """Count one more."""
        self.count += 1
        self.tokens += tokens
        if len(self.first) < _SHOWN_EXAMPLES:
            self.first.append(name)

    def __str__(self) -> str:
        return f"{self.count:,} ({', '.join(self.first)}{', ...' if self.count > len(self.first) else ''})"


@dataclass
class Report:
    """What became of the documents.

    Args:
        split: documents cut to length.
        long, empty: documents left out.
        without_target: pieces left out, as they would teach nothing.
        skipped, refused: rows that cannot be used, by the kind of reason.
    """

    documents: int = 0
    tokens: int = 0
    pieces: int = 0
    piece_tokens: int = 0
    split: Tally = field(default_factory=Tally)
    long: Tally = field(default_factory=Tally)
    empty: Tally = field(default_factory=Tally)
    without_target: Tally = field(default_factory=Tally)
    skipped: dict[str, Tally] = field(default_factory=dict)
    refused: dict[str, Tally] = field(default_factory=dict)

    def fates(self) -> list[str]:
        """Say, a line each, what was cut, left out, skipped or refused, with the first names."""
        lines = []
        if self.split.count:
            lines.append(f"{self.split} cut, {self.pieces:,} pieces in all")
        if self.long.count:
            lines.append(f"{self.long} too long and left out ({self.long.tokens:,} tokens)")
        if self.empty.count:
            lines.append(f"{self.empty} empty and left out")
        if self.without_target.count:
            lines.append(f"{self.without_target} pieces without a target left out")
        for fate, tallies in (("skipped", self.skipped), ("refused", self.refused)):
            for tally in tallies.values():
                lines.append("\n    ".join([f"{tally.count:,} {fate}, such as", *tally.first]))
        return lines

    def __str__(self) -> str:
        return "\n  ".join([f"{self.documents:,} documents, {self.tokens:,} tokens", *self.fates()])

    def to_json(self) -> dict[str, Any]:
        """Return all counts as plain values."""
        return asdict(self)


class Problems:
    """Gather what cannot be used, so that a user sees several at once; stop early where there is no end of it.

    Args:
        skip: whether rows that cannot be read are left out instead.
        patient: whether to go on to the end without raising.
    """

    def __init__(self, report: Report, skip: bool = False, patient: bool = False) -> None:
        self._report, self._skip, self._patient = report, skip, patient
        self._lines: list[str] = []

    def row(self, origin: str, reason: str) -> None:
        """Note a row that cannot be read."""
        if self._skip:
            _count(self._report.skipped, origin, reason)
        else:
            self.refuse(origin, reason)

    def refuse(self, origin: str, reason: str) -> None:
        """Note what makes the data as a whole unusable.

        Raises:
            DataError: there have been enough.
        """
        _count(self._report.refused, origin, reason)
        if self._patient:
            return
        self._lines.append(f"{origin}: {reason.rstrip('.')}.")
        if len(self._lines) == _SHOWN_PROBLEMS:
            raise DataError("\n  ".join(["Data cannot be used; the first problems:", *self._lines]))

    def finish(self) -> None:
        """Raise a DataError if there was a problem."""
        if len(self._lines) == 1:
            raise DataError(self._lines[0])
        if self._lines:
            raise DataError("\n  ".join([f"Data cannot be used, {len(self._lines)} problems:", *self._lines]))


def _count(tallies: dict[str, Tally], origin: str, reason: str) -> None:
    """Count under what reasons share: without their numbers and quotations, and not more than some of them apart."""
    kind = _QUOTED.sub("...", _NUMBER.sub("N", reason)).rstrip(".")
    if kind not in tallies and len(tallies) >= _KINDS:
        kind = "other reasons"
    tallies.setdefault(kind, Tally()).add(f"{origin}: {reason}")

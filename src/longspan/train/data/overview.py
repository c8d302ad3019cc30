"""Look at a run's data as training would read it: lengths, targets, how full rows are, and what is left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from longspan.config import InspectConfig
from longspan.integrations.encoding import Encoder
from longspan.train.data.corpus import cut
from longspan.train.data.readers import read_documents
from longspan.train.data.report import Problems, Report
from longspan.train.data.rows import count_targets
from longspan.train.packing import Recipe, epoch_rows


@dataclass(frozen=True)
class Packed:
    """The rows of an epoch.

    Args:
        fill: share of the rows' tokens that are a document's.
    """

    strategy: str
    rows: int
    fill: float


@dataclass(frozen=True)
class Bar:
    """Documents of `from_tokens` to `to_tokens` tokens."""

    from_tokens: int
    to_tokens: int
    documents: int


@dataclass(frozen=True)
class Overview:
    """What there is.

    Args:
        targets: tokens that are learnt, of those that are trained on.
        lengths: tokens of documents before they are cut: shortest, median, 90th percentile, longest; None of none.
        packed: the rows as the settings have them, and as the other strategies would.
    """

    report: Report
    sequence_length: int
    targets: int
    lengths: tuple[int, int, int, int] | None
    histogram: list[Bar]
    packed: list[Packed]

    @property
    def targets_share(self) -> float:
        """Targets per token that is trained on."""
        return self.targets / max(1, self.report.piece_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        names = ("shortest", "median", "p90", "longest")
        return {
            **self.report.to_json(),
            "sequence_length": self.sequence_length,
            "targets": self.targets,
            "targets_share": self.targets_share,
            "lengths": None if self.lengths is None else dict(zip(names, self.lengths, strict=True)),
            "histogram": [asdict(bar) for bar in self.histogram],
            "rows_per_epoch": self.packed[0].rows if self.packed else 0,
            "packing": [asdict(packed) for packed in self.packed],
        }


def look_at(config: InspectConfig, encoder: Encoder) -> Overview:
    """Read all documents, hold none of them, and say what there is; what training would refuse is counted.

    Raises:
        DataError: files that are missing or cannot be read at all.
    """
    data, report = config.data, Report()
    problems = Problems(report, skip=data.bad_rows == "skip", patient=True)
    documents, pieces, targets = [], [], 0
    for document in read_documents(data, encoder, problems):
        documents.append(len(document.input_ids))
        for piece in cut(document, data, config.sequence_length, problems, report):
            pieces.append(len(piece.input_ids))
            targets += count_targets(piece.input_ids if piece.labels is None else piece.labels)
    documents.sort()
    return Overview(
        report=report,
        sequence_length=config.sequence_length,
        targets=targets,
        lengths=_quantiles(documents) if documents else None,
        histogram=_histogram(documents),
        packed=_packed(pieces, config) if pieces else [],
    )


def _quantiles(lengths: list[int]) -> tuple[int, int, int, int]:
    last = len(lengths) - 1
    return lengths[0], lengths[last // 2], lengths[last * 9 // 10], lengths[-1]


def _histogram(lengths: list[int]) -> list[Bar]:
    """Count lengths between powers of two."""
    counts = Counter(length.bit_length() for length in lengths)
    if not counts:
        return []
    bits = range(min(counts), max(counts) + 1)
    return [Bar((1 << size) >> 1, max(0, (1 << size) - 1), counts[size]) for size in bits]


def _packed(lengths: list[int], config: InspectConfig) -> list[Packed]:
    data, length = config.data, config.sequence_length
    chosen = data.packing_strategy if data.packing else "none"
    found = []
    for strategy in sorted(("best-fit", "in-order", "none"), key=lambda name: name != chosen):
        recipe = Recipe(length, strategy != "none", strategy, shuffle=data.shuffle, seed=config.seed)
        rows = len(epoch_rows(lengths, recipe, 0))
        found.append(Packed(strategy, rows, sum(lengths) / (rows * length)))
    return found

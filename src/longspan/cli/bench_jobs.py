"""What the processes of a benchmark do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longspan.bench.settings import Asked
from longspan.cli.model import named_config

_LONGEST_POSITION = 1 << 24


@dataclass(frozen=True)
class WorkJob:
    """Measure steps, or whether rows fit."""

    asked: Asked
    target: Any
    until: float | None
    device: str

    grouped = True
    modules = ("longspan.bench.step", "longspan.bench.fit")

    @property
    def processes(self) -> int:
        """As many as share a sequence."""
        return self.asked.work.sp

    def run(self, device: Any) -> dict[str, Any] | None:
        """Measure, as one of the processes."""
        from longspan.bench.clock import Deadline
        from longspan.bench.fit import fit
        from longspan.bench.measure import measure
        from longspan.bench.step import Steps

        work = self.asked.work
        layers = {} if work.layers is None else {"num_hidden_layers": work.layers}
        config = named_config(work.model, max_position_embeddings=_LONGEST_POSITION, **layers)
        measure_one: Any = fit if self.asked.fit else Steps(self.asked.steps, self.asked.profile)
        return measure(config, self.asked, self.target, Deadline(self.until), device, measure_one)


@dataclass(frozen=True)
class ExchangeJob:
    """Measure exchanges, or attention over all processes."""

    asked: Any
    attention: bool
    target: Any
    until: float | None
    device: str

    grouped = True
    modules = ("longspan.bench.exchange",)

    @property
    def processes(self) -> int:
        """As many as exchange."""
        return self.asked.sp

    def run(self, device: Any) -> dict[str, Any] | None:
        """Measure, as one of the processes."""
        from longspan.bench.attention import measure_attention
        from longspan.bench.clock import Deadline
        from longspan.bench.exchange import measure_exchange

        measure = measure_attention if self.attention else measure_exchange
        return measure(self.asked, self.target, Deadline(self.until), device)

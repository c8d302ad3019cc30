"""The decisions of one prepared model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What `prepare` decided, frozen and JSON-able.

    Args:
        kernel: attention kernel(s) in use.
        loss: how the loss is computed.
        reasons: why, one sentence each.
    """

    sequence_parallel_size: int
    ulysses_degree: int
    ring_degree: int
    kernel: str
    loss: str
    reasons: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain Python values."""
        return asdict(self)

    def explain(self) -> str:
        """Return the plan in one line."""
        return (
            f"sequence parallel {self.sequence_parallel_size} = ulysses {self.ulysses_degree} x ring "
            f"{self.ring_degree}, kernel {self.kernel}, loss {self.loss} ({'; '.join(self.reasons)})"
        )

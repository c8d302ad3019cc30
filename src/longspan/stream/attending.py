"""What a streamed layer asks of attention, known from its first tile on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longspan.attention.build import Attend
from longspan.attention.call import Request
from longspan.attention.gather import Gather
from longspan.attention.ring import Ring
from longspan.attention.sinks import absorb_, sinks_gradient
from longspan.attention.ulysses import Ulysses
from longspan.batch import Shard
from longspan.kernels.protocol import Score

AttendIn = Callable[[Request], Attend]
"""Returns what serves a layer's attention call."""


@dataclass(frozen=True)
class Attending:
    """How a layer attends.

    Args:
        shard: this rank's part, as the layer's window sees it.
        sinks: those of this rank's heads as they were in forward, or None.
    """

    attend: Attend
    ulysses: Ulysses
    shard: Shard
    score: Score
    sinks: Tensor | None

    @classmethod
    def of(cls, request: Request, attend: Attend, shard: Shard, whole: bool) -> Attending:
        """Read it from the call of a tile.

        Args:
            whole: the exchange of heads takes the whole shard, not one tile.
        """
        q, k, _ = request.operands()
        ulysses = attend.ulysses(q, k, shard.layout.tiles() if whole else ())
        sinks = None if request.sinks is None else ulysses.own(request.sinks.detach()).clone()
        return cls(attend, ulysses, shard.within(request.window), request.score, sinks)

    @property
    def exchange(self) -> Ring | Gather:
        """The exchange of keys between ring ranks, where attention runs once over the whole sequence."""
        return self.attend.exchange(self.shard.schedule)

    def absorb_(self, out: Tensor, lse: Tensor) -> Tensor:
        """Let the sinks take their share of a complete attention -> its log-sum-exp; `out` is changed in place."""
        return lse if self.sinks is None else absorb_(out, lse, self.sinks)

    def sinks_gradient(self, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
        """Return this rank's share [H] of the sinks' gradient, given those of its heads; None without sinks."""
        return None if self.sinks is None else self.ulysses.share(sinks_gradient(dout, out, lse, self.sinks))

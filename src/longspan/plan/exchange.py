"""How keys come to the queries of other ring ranks: around a ring, or gathered where they are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from longspan.errors import ConfigError
from longspan.needs import Needs

KvExchange = Literal["auto", "ring", "gather"]
KV_EXCHANGES = ("auto", "ring", "gather")

MOST_GATHERED = 4
"""Keys that `auto` lets a kernel call hold at a time, in multiples of a rank's own of all heads. What a ring's backward
holds, packets of keys and of their fp32 gradients, is about as large as twice a rank's own keys with theirs."""

MOST_CHUNKS = 8
"""Most chunks of KV heads in which gathered keys travel."""

_OVERLAPPED = 8


class Decision(NamedTuple):
    """The exchange of one micro-batch, and why."""

    exchange: Literal["ring", "gather"]
    reason: str

    def __str__(self) -> str:
        return f"{self.exchange} ({self.reason})"


ALONE = Decision("ring", "one ring rank holds all keys")


def chunks_of(needs: Needs) -> int:
    """Return in how many chunks KV heads travel, if there are as many; equal on all ranks.

    More than one where some rank receives at least one key for 8 of its own: below that there is nothing worth hiding,
    and one kernel call fills a GPU better than several.
    """
    return MOST_CHUNKS if _OVERLAPPED * needs.remote > needs.shard else 1


@dataclass(frozen=True)
class ExchangeRule:
    """Decides for each micro-batch, from what all ranks know.

    Args:
        asked: `ring` or `gather` by hand, or `auto`.
        kv_heads: KV heads of a rank, in the layer where they are fewest.
        refusal: why the kernel cannot compute what a gather needs, or None.
    """

    asked: KvExchange = "auto"
    kv_heads: int = 1
    refusal: str | None = None

    def __post_init__(self) -> None:
        if self.asked == "gather" and self.refusal:
            raise ConfigError(
                f"kv_exchange 'gather' needs packed causal calls with more keys than queries: {self.refusal}. Name "
                "another kernel, or leave kv_exchange at 'auto' or 'ring'."
            )

    def before(self, rows: int, packed: bool) -> Decision | None:
        """Return the decision if no needs have to be known for it."""
        if self.asked != "auto":
            return Decision(self.asked, f"kv_exchange='{self.asked}'")
        if not packed:
            return Decision("ring", "rows of one document need all keys")
        if rows > 1:
            return Decision("ring", f"{rows} rows share one division, which cannot follow the documents of each")
        return Decision("ring", self.refusal) if self.refusal else None

    def decide(self, needs: Needs, ring: int) -> Decision:
        """Return the decision for a packed row that is divided by documents."""
        passing = needs.shard * (ring - 1)
        held = needs.keys / min(chunks_of(needs), self.kv_heads) / needs.shard
        moved = f"{needs.remote:,} keys travel to a rank at most, in a ring {passing:,} would"
        if needs.remote > passing:
            return Decision("ring", moved)
        if held > MOST_GATHERED:
            return Decision("ring", f"{moved}, but a kernel call would hold {held:.1f} times a rank's own keys at once")
        return Decision("gather", moved)


AUTOMATIC = ExchangeRule()

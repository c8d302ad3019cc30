"""Which heads each Ulysses rank works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from longspan.errors import TopologyError


@dataclass(frozen=True)
class HeadSplit:
    """Divide `heads` query heads over `size` ranks in contiguous runs, the first ranks taking one more if uneven.

    Each rank gets the KV heads that its query heads use; a KV head used on several ranks is replicated, and its
    gradient is the sum over the replicas.
    """

    heads: int
    kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise TopologyError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly.")
        if self.size > self.heads:
            raise TopologyError(f"{self.size} ranks cannot share {self.heads} query heads.")

    @cached_property
    def query(self) -> tuple[range, ...]:
        """Query heads of each rank."""
        small, extra = divmod(self.heads, self.size)
        stops = [small * (j + 1) + min(j + 1, extra) for j in range(self.size)]
        return tuple(range(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True))

    @cached_property
    def key(self) -> tuple[range, ...]:
        """KV heads of each rank."""
        share = self.heads // self.kv_heads
        return tuple(range(q[0] // share, q[-1] // share + 1) for q in self.query)

    def expansion(self, rank: int) -> list[int] | None:
        """Return the position of the KV head of each query head of a rank, or None when they are shared evenly.

        An uneven sharing (two query heads of one KV head, one of the next) is a form that grouped-query kernels do not
        take: the KV heads are then repeated, one per query head.
        """
        share = self.heads // self.kv_heads
        first = self.key[rank][0]
        used = [h // share - first for h in self.query[rank]]
        counts = {used.count(i) for i in range(len(self.key[rank]))}
        return None if len(counts) == 1 else used

    def replicas(self) -> Sequence[int]:
        """Return the KV head at each position when the KV heads of all ranks are laid one after the other."""
        return [h for ks in self.key for h in ks]

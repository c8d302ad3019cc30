"""The Ulysses exchange by copies between memories that the ranks of an axis share, without a collective.

A rank pushes what it owes to others straight from where it lies into slots of their memory, the ranks meet, and all has
arrived. Pushing is left to the copy engines of a GPU, so that an exchange takes no multiprocessor from the compute it
runs under.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from longspan.comm.link import Link, SharedMemoryError, Slots
from longspan.comm.pending import EXCHANGE, Pending
from longspan.comm.routes import ALIGNMENT_BYTES, Route, ToHeads, ToTokens
from longspan.layout import Piece
from longspan.stopwatch import Stopwatch

SLOTS = 4


class CopyEngine:
    """Exchanges heads over a link.

    All ranks make the same exchanges in the same order, so that each knows which slot of the others is in turn. With
    c(n) what the caller had queued when exchange n started, a rank's pushes and meetings follow in one queue: c(n),
    pushes of n, meeting n, c(n + 1), and so on. There are two ways.

    - Copied: chunks of tokens go through slots and are copied from there, by copy engines, into memory of the caller's.
      Chunk n overwrites what chunk n - slots left. Its push follows meeting n - 1, and a rank comes there only after it
      has copied chunk n - slots out of its slot.
    - Borrowed: an exchange goes to where it belongs in results that are a slot, and nothing is copied. They are the
      caller's for what it queues before the `slots - 1`-th borrowed exchange after this one starts. Exchange n
      overwrites the results of n - slots: its push follows meeting n - 1, which follows everybody's c(n - 1). Who
      never took the results has not waited for them: so a rank comes to meeting n - 1 only after its own part of
      exchange n - slots is in its slot, and copies its own part of n there only after meeting n - slots.

    What stays on the rank is copied beside the pushes. The host waits for nothing.

    What is sent must stay as it is until the exchange has been waited for; it may be let go at once. Heads that do not
    lie side by side in a token are first copied so, on the caller's queue. Both ends are on one stream of the caller's.

    Cost: what goes to other ranks crosses the link once, what stays is copied once; copied results are copied once
    more. One small meeting per chunk, or per borrowed exchange. Memory: `slots` slots of either kind.

    Args:
        slot_bytes: of slots for chunks.
        lent_bytes: most bytes of slots for borrowed results, which grow with what is asked for; exchanges that need
            more are copied. Growing is collective and keeps the host waiting; it happens a few times.
        waits: counts how long the caller's queue waits; None: nothing does.
    """

    def __init__(
        self,
        link: Link,
        slot_bytes: int,
        lent_bytes: int = 0,
        slots: int = SLOTS,
        waits: Stopwatch | None = None,
    ) -> None:
        if slots < 3:
            raise ValueError(f"A copy engine needs at least 3 slots, got {slots}.")
        self.link, self.lent_bytes, self._waits = link, lent_bytes, waits or Stopwatch()
        self._passing = link.allocate(slots, slot_bytes)
        self._lent: Slots | None = None
        self._outgrown: list[tuple[int, Any, Slots]] = []  # borrowed exchange that ends it, mark of that, slots
        self._lendings = 0
        self._started = 0
        self._flying: dict[int, tuple[list[Any], list[Tensor], list[Tensor]]] = {}

    def to_heads(
        self,
        tensors: Sequence[Tensor],
        heads: Sequence[Sequence[range]],
        parts: Sequence[Piece] = (),
        borrow: bool = False,
    ) -> Pending[list[Tensor]]:
        """See `longspan.comm.exchange.to_heads`."""
        return self._start(ToHeads(tensors, heads, parts, self.link.size, self.link.rank), borrow)

    def to_tokens(
        self,
        tensors: Sequence[Tensor],
        heads: Sequence[Sequence[range]],
        parts: Sequence[Piece] = (),
        borrow: bool = False,
    ) -> Pending[list[Tensor]]:
        """See `longspan.comm.exchange.to_tokens`."""
        return self._start(ToTokens(tensors, heads, parts, self.link.size, self.link.rank), borrow)

    def _start(self, exchange: Route, borrow: bool) -> Pending[list[Tensor]]:
        passed = self.link.passed
        self._flying = {n: kept for n, kept in self._flying.items() if not all(map(passed, kept[0]))}
        self._outgrown = [kept for kept in self._outgrown if kept[1] is None or not passed(kept[1])]
        slots = self._room(exchange.lent_bytes()) if borrow else None
        marks, results = self._copied(exchange) if slots is None else self._borrowed(exchange, slots)
        number, self._started = self._started, self._started + 1
        self._flying[number] = marks, exchange.tensors, results

        def finish() -> list[Tensor]:
            with self._waits.span(EXCHANGE):
                for mark in marks:
                    self.link.wait(mark)
            self._flying.pop(number, None)
            return results

        return Pending([], finish)

    def _copied(self, exchange: Route) -> tuple[list[Any], list[Tensor]]:
        link, slots, results = self.link, self._passing, exchange.new_results()
        ready = link.ready()
        copied = link.copy([ready], exchange.direct(results, link.rank))
        for chunk in exchange.chunks(slots.bytes):
            number = slots.take()
            link.push([ready], exchange.outgoing(slots, number, chunk))
            met = link.meet(slots.copied(slots.count - 1))
            copied = link.copy([met], exchange.incoming(slots, number, chunk, results))
            slots.end(met, copied)
        return [copied], results

    def _borrowed(self, exchange: Route, slots: Slots) -> tuple[list[Any], list[Tensor]]:
        link, number = self.link, slots.take()
        views = [exchange.lent(slots.buffers[rank][number], rank) for rank in range(link.size)]
        ready = link.ready()
        link.push([ready], [pair for other in exchange.others for pair in exchange.direct(views[other], other)])
        copied = link.copy([ready, *slots.met(slots.count)], exchange.direct(views[link.rank], link.rank))
        met = link.meet(slots.copied(slots.count - 1))
        slots.end(met, copied)
        self._outgrown = [(n, met if n == self._lendings else mark, old) for n, mark, old in self._outgrown]
        self._lendings += 1
        return [met, copied], views[link.rank]

    def _room(self, size: int) -> Slots | None:
        """Return slots of at least this size for results that are borrowed, or None if they are to be copied."""
        slots = self._lent
        if slots is not None and size <= slots.bytes:
            return slots
        step = max(ALIGNMENT_BYTES, 1 << max(0, size.bit_length() - 3))
        wanted = -(-size // step) * step  # at most a quarter more, and few sizes as lengths grow
        if wanted > self.lent_bytes:
            return None
        try:
            self._lent = self.link.allocate(self._passing.count, wanted)
        except SharedMemoryError as error:
            self.lent_bytes = 0 if slots is None else slots.bytes
            warnings.warn(
                f"Exchanges of {size / 2**20:.0f} MiB are copied once more, as no memory for them is shared: {error}",
                stacklevel=2,
            )
            return None
        if slots is not None:  # what is borrowed from the old ones stays as it is for as long as was promised
            self._outgrown.append((self._lendings + slots.count, None, slots))
        return self._lent

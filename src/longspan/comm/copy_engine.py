"""The Ulysses exchange by copies between memories that the ranks of an axis share, without a collective.

What a rank owes to others it stages in a slot of its shared buffer, packed by receiver; the ranks meet; each then
fetches what it is owed straight into the tensors it returns. Fetching is left to the copy engines of a GPU, so that an
exchange takes no multiprocessor from the compute it runs under.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from longspan.comm.pending import Pending
from longspan.errors import BatchError
from longspan.layout import Piece

Copy = tuple[Tensor, Tensor]
"""Destination and source, views [B, n, h, D] of one shape; the last two dims of each lie dense where it is fetched."""

ALIGNMENT_BYTES = 256


class Link(Protocol):
    """Shared buffers of the ranks of an axis, and three queues of work on each rank: the caller's own, one in which the
    ranks meet, and one that fetches.

    Work of one queue runs in order. A mark stands for the end of something queued; `after` are marks to wait for.
    """

    size: int
    rank: int
    slots: int
    slot_bytes: int

    def slot(self, rank: int, number: int) -> Tensor:
        """Return a slot of a rank's buffer, uint8 [slot_bytes]."""
        ...

    def stage(self, after: Sequence[Any], copies: Sequence[Copy]) -> Any:
        """Queue copies with the caller's own work -> mark."""
        ...

    def meet(self, after: Sequence[Any]) -> Any:
        """Queue a barrier of all ranks -> mark; it makes all that they did before visible."""
        ...

    def fetch(self, after: Sequence[Any], copies: Sequence[Copy]) -> Any:
        """Queue copies from the buffers of other ranks -> mark."""
        ...

    def wait(self, mark: Any) -> None:
        """Make the caller's later work wait for a mark."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether a mark has been reached, without waiting."""
        ...


class CopyEngine:
    """Exchanges heads over a link, in chunks of tokens that take its slots in turn.

    While a chunk is fetched the next one is staged; the first is small, so that fetching starts early. All ranks make
    the same exchanges in the same order, so chunk n is in slot n % slots everywhere, and the following keeps a slot
    from being overwritten while another rank reads it: a rank comes to meeting m only after it has fetched chunk m - 2,
    and it stages chunk n only after meeting n - slots + 2, which thus comes after everyone's fetch of chunk n - slots.
    The host waits for nothing.

    The tensors returned are ordinary memory of the caller's, and belong to the caller after `wait`; what is sent may
    be freed or overwritten as soon as the exchange has been started. Both ends are on one stream of the caller's.

    Cost: what goes to other ranks is read and written once on the caller's queue and fetched once; what stays is copied
    once. Small meetings: one per chunk.
    """

    def __init__(self, link: Link) -> None:
        if link.slots < 3:
            raise ValueError(f"A copy engine needs at least 3 slots, got {link.slots}.")
        self.link = link
        self._count = 0
        self._met: deque[Any] = deque(maxlen=link.slots - 2)  # marks of the last meetings
        self._fetched: deque[Any] = deque(maxlen=2)
        self._flying: dict[int, tuple[Any, list[Tensor]]] = {}

    def to_heads(
        self, tensors: Sequence[Tensor], heads: Sequence[Sequence[range]], parts: Sequence[Piece] = ()
    ) -> Pending[list[Tensor]]:
        """See `longspan.comm.exchange.to_heads`."""
        return self._start(_ToHeads(tensors, heads, parts, self.link))

    def to_tokens(
        self, tensors: Sequence[Tensor], heads: Sequence[Sequence[range]], parts: Sequence[Piece] = ()
    ) -> Pending[list[Tensor]]:
        """See `longspan.comm.exchange.to_tokens`."""
        return self._start(_ToTokens(tensors, heads, parts, self.link))

    def _start(self, exchange: _Exchange) -> Pending[list[Tensor]]:
        self._flying = {n: kept for n, kept in self._flying.items() if not self.link.passed(kept[0])}
        for chunk in exchange.chunks():
            self._chunk(exchange, chunk)
        self.link.stage((), exchange.own())  # under the fetches, which do not need it
        number, mark, results = self._count, self._fetched[-1], exchange.results
        self._flying[number] = mark, results

        def finish() -> list[Tensor]:
            self.link.wait(mark)
            self._flying.pop(number, None)
            return results

        return Pending([], finish)

    def _chunk(self, exchange: _Exchange, chunk: Piece) -> None:
        link, number = self.link, self._count % self.link.slots
        free = [self._met[0]] if len(self._met) == self._met.maxlen else []
        before_last = [self._fetched[0]] if len(self._fetched) == self._fetched.maxlen else []
        staged = link.stage(free, exchange.outgoing(number, chunk))
        met = link.meet([staged, *before_last])
        self._met.append(met)
        self._fetched.append(link.fetch([met], exchange.incoming(number, chunk)))
        self._count += 1


class _Exchange:
    """One exchange as one rank sees it: which views go where. Tokens are counted as the rank holds them on its own."""

    results: list[Tensor]

    def __init__(
        self, tensors: Sequence[Tensor], heads: Sequence[Sequence[range]], parts: Sequence[Piece], link: Link
    ) -> None:
        self.tensors, self.heads, self.link = list(tensors), heads, link
        self.size, self.rank = link.size, link.rank
        self.batch = tensors[0].shape[0]
        self.parts = list(parts) or [Piece(0, self.tokens)]

    @property
    def tokens(self) -> int:
        """Tokens that this rank holds on its own."""
        raise NotImplementedError

    def source(self, i: int, rank: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        """Return what a rank is sent of tensor i, as views with the tokens of the chunk they hold."""
        raise NotImplementedError

    def destination(self, i: int, rank: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        """Return where what a rank sends of tensor i belongs."""
        raise NotImplementedError

    def owner(self, sender: int, receiver: int) -> int:
        """Return the rank whose heads travel between two ranks."""
        raise NotImplementedError

    def offset(self, sender: int, receiver: int, totals: list[int]) -> int:
        """Return where in the sender's slot the receiver's block begins; blocks are in the order of receivers."""
        raise NotImplementedError

    def chunks(self) -> Iterator[Piece]:
        """Yield the tokens of each chunk, the same on every rank: first an eighth of a slot, then up to a whole one."""
        ranks = range(self.size)
        row_bytes = max(
            sum(self._block_bytes(i, self.owner(j, r), 1) for r in ranks if r != j for i in range(len(self.tensors)))
            for j in ranks
        )
        slack = ALIGNMENT_BYTES * len(self.tensors) * self.size
        most = (self.link.slot_bytes - slack) // row_bytes
        if most < 1:
            raise BatchError(
                f"One token of {self.batch} rows is {row_bytes} bytes to exchange, more than the "
                f"{self.link.slot_bytes} bytes of a slot; use smaller batches."
            )
        start, size = 0, max(1, most // 8)
        while start < self.tokens:
            yield Piece(start, min(start + size, self.tokens))
            start, size = start + size, min(4 * size, most)

    def outgoing(self, number: int, chunk: Piece) -> list[Copy]:
        """Return the copies into this rank's slot."""
        slot, totals = self.link.slot(self.rank, number), self._totals(len(chunk))
        return [
            (block[:, at.start - chunk.start : at.stop - chunk.start], view)
            for other in self._others()
            for i, block in enumerate(self._blocks(slot, self.rank, other, totals, len(chunk)))
            for at, view in self.source(i, other, chunk)
        ]

    def incoming(self, number: int, chunk: Piece) -> list[Copy]:
        """Return the copies out of the other ranks' slots, from the next rank on, so that no rank is read by all."""
        totals = self._totals(len(chunk))
        return [
            (view, block[:, at.start - chunk.start : at.stop - chunk.start])
            for other in self._others()
            for i, block in enumerate(self._blocks(self.link.slot(other, number), other, self.rank, totals, len(chunk)))
            for at, view in self.destination(i, other, chunk)
        ]

    def own(self) -> list[Copy]:
        """Return the copies of what stays on this rank."""
        return [
            (to, view[:, at.start - part.start : at.stop - part.start])
            for i in range(len(self.tensors))
            for part, view in self.source(i, self.rank, Piece(0, self.tokens))
            for at, to in self.destination(i, self.rank, part)
        ]

    def _others(self) -> list[int]:
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _blocks(self, slot: Tensor, sender: int, receiver: int, totals: list[int], tokens: int) -> list[Tensor]:
        """Return the parts of a sender's slot that are for a receiver, [B, tokens, h_i, D_i] for each tensor."""
        at, blocks, owner = self.offset(sender, receiver, totals), [], self.owner(sender, receiver)
        for i, t in enumerate(self.tensors):
            size = self._block_bytes(i, owner, tokens)
            shape = (self.batch, tokens, len(self.heads[i][owner]), t.shape[-1])
            blocks.append(slot[at : at + size].view(t.dtype).view(shape))
            at += _aligned(size)
        return blocks

    def _totals(self, tokens: int) -> list[int]:
        """Return the bytes that a block with the heads of each rank takes."""
        tensors = range(len(self.tensors))
        return [sum(_aligned(self._block_bytes(i, j, tokens)) for i in tensors) for j in range(self.size)]

    def _block_bytes(self, i: int, owner: int, tokens: int) -> int:
        t = self.tensors[i]
        return self.batch * tokens * len(self.heads[i][owner]) * t.shape[-1] * t.element_size()

    def _joined(self, t: Tensor, rank: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        """Return where a rank's tokens are in a tensor that holds those of all ranks, part by part."""
        found = []
        for part in self.parts:
            both = part.meet(chunk)
            if both is not None:
                start = part.start * self.size + rank * len(part) + both.start - part.start
                found.append((both, t[:, start : start + len(both)]))
        return found

    @cached_property
    def _columns(self) -> list[list[slice]]:
        """Where the heads of each rank are, laid one rank after the other."""
        columns = []
        for ranks in self.heads:
            stops = [sum(len(h) for h in ranks[: j + 1]) for j in range(self.size)]
            columns.append([slice(stop - len(h), stop) for stop, h in zip(stops, ranks, strict=True)])
        return columns


class _ToHeads(_Exchange):
    """From own tokens of all heads to all tokens of own heads."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        counts = [len(h[self.rank]) for h in self.heads]
        self.results = [
            t.new_empty(self.batch, self.tokens * self.size, n, t.shape[-1])
            for t, n in zip(self.tensors, counts, strict=True)
        ]

    @property
    def tokens(self) -> int:
        return self.tensors[0].shape[1]

    def source(self, i: int, rank: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        heads = self.heads[i][rank]
        return [(chunk, self.tensors[i][:, chunk.start : chunk.stop, heads.start : heads.stop])]

    def destination(self, i: int, rank: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        return self._joined(self.results[i], rank, chunk)

    def owner(self, sender: int, receiver: int) -> int:
        return receiver

    def offset(self, sender: int, receiver: int, totals: list[int]) -> int:
        return sum(totals[:receiver]) - (totals[sender] if sender < receiver else 0)


class _ToTokens(_Exchange):
    """From all tokens of own heads to own tokens of all heads."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.results = [
            t.new_empty(self.batch, self.tokens, columns[-1].stop, t.shape[-1])
            for t, columns in zip(self.tensors, self._columns, strict=True)
        ]

    @property
    def tokens(self) -> int:
        return self.tensors[0].shape[1] // self.size

    def source(self, i: int, rank: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        return self._joined(self.tensors[i], rank, chunk)

    def destination(self, i: int, rank: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        return [(chunk, self.results[i][:, chunk.start : chunk.stop, self._columns[i][rank]])]

    def owner(self, sender: int, receiver: int) -> int:
        return sender

    def offset(self, sender: int, receiver: int, totals: list[int]) -> int:
        return (receiver - (sender < receiver)) * totals[sender]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

"""Which views of whose tensors go where in an exchange of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import Tensor

from longspan.comm.exchange import copy
from longspan.comm.link import Copy, Slots
from longspan.errors import BatchError
from longspan.layout import Piece

ALIGNMENT_BYTES = 256


class Route:
    """One exchange as one rank sees it: which views go where. Tokens are counted as the rank holds them on its own."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        heads: Sequence[Sequence[range]],
        parts: Sequence[Piece],
        size: int,
        rank: int,
    ) -> None:
        self.tensors, self.heads = [_dense(t) for t in tensors], heads
        self.size, self.rank = size, rank
        self.batch = tensors[0].shape[0]
        self.parts = list(parts) or [Piece(0, self.tokens)]
        # From the next rank on, so that no rank is written to by all.
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def tokens(self) -> int:
        """Tokens that this rank holds on its own."""
        raise NotImplementedError

    def shape(self, i: int, receiver: int) -> tuple[int, ...]:
        """Return the shape of a rank's result i."""
        raise NotImplementedError

    def source(self, i: int, receiver: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        """Return what a rank is sent of tensor i, as views with the tokens of the chunk they hold."""
        raise NotImplementedError

    def destination(self, result: Tensor, i: int, sender: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        """Return where in result i, of whatever rank, belongs what a rank sends."""
        raise NotImplementedError

    def owner(self, sender: int, receiver: int) -> int:
        """Return the rank whose heads travel between two ranks."""
        raise NotImplementedError

    def new_results(self) -> list[Tensor]:
        """Return this rank's results, in memory of their own."""
        return [t.new_empty(self.shape(i, self.rank)) for i, t in enumerate(self.tensors)]

    def lent(self, slot: Tensor, receiver: int) -> list[Tensor]:
        """Return the results of a rank as views of its slot."""
        return self._cut(slot, 0, [self.shape(i, receiver) for i in range(len(self.tensors))])

    def lent_bytes(self) -> int:
        """Return the bytes of a slot that takes the results of any rank."""
        return max(
            sum(aligned(self._bytes(i, self.shape(i, rank))) for i in range(len(self.tensors)))
            for rank in range(self.size)
        )

    def direct(self, results: Sequence[Tensor], receiver: int) -> list[Copy]:
        """Return the copies from this rank's tensors to a rank's results."""
        return [
            (to, view[:, at.start - part.start : at.stop - part.start])
            for i, result in enumerate(results)
            for part, view in self.source(i, receiver, Piece(0, self.tokens))
            for at, to in self.destination(result, i, self.rank, part)
        ]

    def chunks(self, slot_bytes: int) -> Iterator[Piece]:
        """Yield the tokens of each chunk, nearly equal, the same on every rank."""
        ranks, tensors = range(self.size), range(len(self.tensors))
        row_bytes = max(
            sum(self._bytes(i, self._block(i, j, r, 1)) for j in ranks if j != r for i in tensors) for r in ranks
        )
        most = (slot_bytes - ALIGNMENT_BYTES * len(tensors) * self.size) // row_bytes
        if most < 1:
            raise BatchError(
                f"One token of {self.batch} rows is {row_bytes} bytes to exchange, more than the {slot_bytes} bytes of "
                "a slot; use smaller batches."
            )
        count = -(-self.tokens // most)
        edges = [self.tokens * number // count for number in range(count + 1)]
        yield from (Piece(a, b) for a, b in zip(edges, edges[1:], strict=False))

    def outgoing(self, slots: Slots, number: int, chunk: Piece) -> list[Copy]:
        """Return the copies of a chunk into the other ranks' slots."""
        return [
            (block[:, at.start - chunk.start : at.stop - chunk.start], view)
            for other in self.others
            for i, block in enumerate(self._blocks(slots.buffers[other][number], self.rank, other, len(chunk)))
            for at, view in self.source(i, other, chunk)
        ]

    def incoming(self, slots: Slots, number: int, chunk: Piece, results: Sequence[Tensor]) -> list[Copy]:
        """Return the copies of a chunk out of this rank's slot."""
        return [
            (view, block[:, at.start - chunk.start : at.stop - chunk.start])
            for other in self.others
            for i, block in enumerate(self._blocks(slots.buffers[self.rank][number], other, self.rank, len(chunk)))
            for at, view in self.destination(results[i], i, other, chunk)
        ]

    def _blocks(self, slot: Tensor, sender: int, receiver: int, tokens: int) -> list[Tensor]:
        """Return the parts of a receiver's slot that a sender fills, one per tensor; senders follow in order."""
        at = sum(
            aligned(self._bytes(i, self._block(i, other, receiver, tokens)))
            for other in range(sender)
            if other != receiver
            for i in range(len(self.tensors))
        )
        return self._cut(slot, at, [self._block(i, sender, receiver, tokens) for i in range(len(self.tensors))])

    def _block(self, i: int, sender: int, receiver: int, tokens: int) -> tuple[int, ...]:
        heads = self.heads[i][self.owner(sender, receiver)]
        return self.batch, tokens, len(heads), self.tensors[i].shape[-1]

    def _bytes(self, i: int, shape: tuple[int, ...]) -> int:
        return shape[0] * shape[1] * shape[2] * shape[3] * self.tensors[i].element_size()

    def _cut(self, slot: Tensor, at: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return views of these shapes that follow each other in a slot."""
        views = []
        for i, shape in enumerate(shapes):
            size = self._bytes(i, shape)
            views.append(slot[at : at + size].view(self.tensors[i].dtype).view(shape))
            at += aligned(size)
        return views

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


class ToHeads(Route):
    """From own tokens of all heads to all tokens of own heads."""

    @property
    def tokens(self) -> int:
        return self.tensors[0].shape[1]

    def shape(self, i: int, receiver: int) -> tuple[int, ...]:
        return self.batch, self.tokens * self.size, len(self.heads[i][receiver]), self.tensors[i].shape[-1]

    def source(self, i: int, receiver: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        heads = self.heads[i][receiver]
        return [(chunk, self.tensors[i][:, chunk.start : chunk.stop, heads.start : heads.stop])]

    def destination(self, result: Tensor, i: int, sender: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        return self._joined(result, sender, chunk)

    def owner(self, sender: int, receiver: int) -> int:
        return receiver


class ToTokens(Route):
    """From all tokens of own heads to own tokens of all heads."""

    @property
    def tokens(self) -> int:
        return self.tensors[0].shape[1] // self.size

    def shape(self, i: int, receiver: int) -> tuple[int, ...]:
        return self.batch, self.tokens, self._columns[i][-1].stop, self.tensors[i].shape[-1]

    def source(self, i: int, receiver: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        return self._joined(self.tensors[i], receiver, chunk)

    def destination(self, result: Tensor, i: int, sender: int, chunk: Piece) -> list[tuple[Piece, Tensor]]:
        return [(chunk, result[:, chunk.start : chunk.stop, self._columns[i][sender]])]

    def owner(self, sender: int, receiver: int) -> int:
        return sender


def aligned(size: int) -> int:
    """Return bytes rounded up to where a tensor may begin."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _dense(t: Tensor) -> Tensor:
    """Return a tensor [B, s, H, D] whose heads lie side by side in each token, itself if they do."""
    heads, dim = t.shape[2:]
    if (dim == 1 or t.stride(3) == 1) and (heads == 1 or t.stride(2) == dim):
        return t
    dense = t.new_empty(t.shape)
    copy(dense, t)
    return dense

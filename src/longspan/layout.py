"""Which tokens of a row each sequence-parallel rank holds: a pure function of lengths and degrees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from longspan.errors import TopologyError


@dataclass(frozen=True)
class Piece:
    """A contiguous range of token indices of a row, `stop` excluded."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def meet(self, other: Piece) -> Piece | None:
        """Return the tokens that both hold, or None."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Piece(start, stop) if start < stop else None


class Segment(NamedTuple):
    """Tokens `start` to `stop` (excluded) of one document, counted from the document's first token."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Divide rows of `tokens` tokens over `ring` x `ulysses` ranks.

    The ring axis cuts a row into 2r equal pieces, of which ring rank i holds pieces i and 2r-1-i: causal work is then
    the same on every rank. The Ulysses axis divides what a ring rank holds into contiguous parts, or, with `tile`,
    interleaves it: tile c of rank j is part c*u + j, so that exchanging one tile over the ranks yields a contiguous
    range. Rank order inside a sequence-parallel group is ring-major: rank = ring_rank * ulysses + ulysses_rank.

    Args:
        tokens: tokens per row, without padding.
        tile: tokens per tile and rank under Ulysses interleaving; None for contiguous parts.
        zigzag: False gives ring rank i the contiguous i-th part instead (unbalanced under a causal mask).
        held: what each ring rank holds in place of the zigzag, ascending and of equal tokens; for packed rows
            `longspan.segments.segment_layout` works it out.

    Raises:
        TopologyError: senseless numbers, or `held` that does not give each token to one rank in equal shares.
    """

    tokens: int
    ring: int = 1
    ulysses: int = 1
    tile: int | None = None
    zigzag: bool = True
    held: tuple[tuple[Piece, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.ring < 1 or self.ulysses < 1 or (self.tile is not None and self.tile < 1):
            raise TopologyError(
                f"A layout needs at least one token, one rank per axis and one token per tile, got tokens="
                f"{self.tokens}, ring={self.ring}, ulysses={self.ulysses}, tile={self.tile}."
            )
        if self.held is not None:
            self._check_held(self.held)

    @property
    def size(self) -> int:
        """Number of sequence-parallel ranks."""
        return self.ring * self.ulysses

    @property
    def length(self) -> int:
        """Tokens per row with padding: the next multiple of what the pieces divide, less than 2 * size more."""
        unit = self.size * (2 if self.ring > 1 and self.zigzag else 1)
        return -(-self.tokens // unit) * unit

    @property
    def shard_tokens(self) -> int:
        """Tokens per row that each rank holds."""
        return self.length // self.size

    def ring_pieces(self, ring_rank: int) -> tuple[Piece, ...]:
        """Return what the ranks of one ring position hold together, in the order in which Ulysses joins it."""
        if self.held is not None:
            return self.held[ring_rank]
        if self.ring == 1 or not self.zigzag:
            part = self.length // self.ring
            return (Piece(ring_rank * part, (ring_rank + 1) * part),)
        part, mirror = self.length // (2 * self.ring), 2 * self.ring - 1 - ring_rank
        return (Piece(ring_rank * part, (ring_rank + 1) * part), Piece(mirror * part, (mirror + 1) * part))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the token ranges of a sequence-parallel rank, ascending; together they are its shard."""
        ring_rank, ulysses_rank = divmod(rank, self.ulysses)
        whole = self.ring_pieces(ring_rank)
        return tuple(cut for part in self._parts(ulysses_rank) for cut in _cut(whole, part))

    def indices(self, rank: int) -> list[int]:
        """Return the token index of each position of a rank's shard. Cost: O(shard), for tests and small batches."""
        return [i for piece in self.pieces(rank) for i in range(piece.start, piece.stop)]

    def segments(self, rank: int, starts: Sequence[int]) -> tuple[Segment, ...]:
        """Cut a rank's pieces at document borders.

        Args:
            starts: ascending first token of each document of the row, the first being 0.
        """
        documents = [Piece(a, b) for a, b in pairwise([*starts, self.length])]
        return tuple(
            Segment(number, both.start - document.start, both.stop - document.start)
            for piece in self.pieces(rank)
            for number, document in enumerate(documents)
            if (both := piece.meet(document)) is not None
        )

    def tiles(self) -> tuple[Piece, ...]:
        """Return the parts of a shard, in its positions, that are interleaved with those of other Ulysses ranks."""
        tile = self.tile or self.shard_tokens
        return tuple(Piece(a, min(a + tile, self.shard_tokens)) for a in range(0, self.shard_tokens, tile))

    def _check_held(self, held: tuple[tuple[Piece, ...], ...]) -> None:
        ascending = all(a.stop <= b.start for pieces in held for a, b in pairwise(pieces))
        sizes = [sum(map(len, pieces)) for pieces in held]
        joined = sorted((piece.start, piece.stop) for pieces in held for piece in pieces)
        whole = [(0, 0), *joined, (self.length, self.length)]
        if (
            not ascending
            or sizes != [self.length // self.ring] * self.ring
            or any(a[1] != b[0] or a[0] > a[1] for a, b in pairwise(whole))
        ):
            raise TopologyError(
                f"Each of {self.length} tokens must be held by one of {self.ring} ring ranks, in ascending pieces of "
                f"{self.length // self.ring} tokens in all; got {sizes} tokens."
            )

    def _parts(self, ulysses_rank: int) -> Iterator[Piece]:
        """Yield the ranges of a Ulysses rank inside what its ring position holds."""
        held = self.length // self.ring
        tile = self.tile or held // self.ulysses
        for start in range(0, held, tile * self.ulysses):
            part = min(tile, (held - start) // self.ulysses)
            yield Piece(start + ulysses_rank * part, start + (ulysses_rank + 1) * part)


def _cut(pieces: Sequence[Piece], part: Piece) -> Iterator[Piece]:
    """Yield the tokens of `pieces`, laid one after the other, that stand at positions `part`."""
    offset = 0
    for piece in pieces:
        both = Piece(offset, offset + len(piece)).meet(part)
        if both is not None:
            shift = piece.start - offset
            yield Piece(both.start + shift, both.stop + shift)
        offset += len(piece)


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return ascending pieces, those that follow each other as one."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].stop == piece.start:
            found[-1] = Piece(found[-1].start, piece.stop)
        else:
            found.append(piece)
    return tuple(found)

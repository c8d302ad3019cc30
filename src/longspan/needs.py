"""Which keys each ring rank needs from which other: what a gather exchange moves, and what its kernel calls see."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longspan.layout import Layout, Piece, joined
from longspan.mask import Mask


class Run(NamedTuple):
    """Tokens `start` to `stop` of one document on one rank, and the first key that one of them sees.

    Tokens are numbered over the padded rows of a batch, laid one after the other; `document` likewise.
    """

    start: int
    stop: int
    first: int
    document: int


@dataclass(frozen=True)
class Needs:
    """What each ring rank holds, and what it needs besides.

    A run needs the keys from `first` to its own start, wherever they are: on other ranks, or in an earlier run of its
    document on the same rank. What several runs of a rank need is listed once.

    Args:
        runs: of each ring rank, in the order of its tokens.
        wanted: of each ring rank, ascending.
        shard: tokens of a ring rank, over all rows.
    """

    runs: tuple[tuple[Run, ...], ...]
    wanted: tuple[tuple[Piece, ...], ...]
    shard: int

    @classmethod
    def of(cls, mask: Mask, layout: Layout, rows: int = 1) -> Needs:
        """Work out the needs of all ring ranks. Pure.

        Args:
            rows: of the batch, each divided alike.

        Cost: O(documents x log) on the host.
        """
        starts = mask.documents or ((0,),) * rows
        runs = tuple(tuple(_runs(layout, rank, starts, mask.window)) for rank in range(layout.ring))
        wanted = tuple(_union(Piece(run.first, run.start) for run in own if run.first < run.start) for own in runs)
        return cls(runs, wanted, len(starts) * layout.length // layout.ring)

    def sent(self, source: int, destination: int) -> tuple[Piece, ...]:
        """Return the tokens that a rank holds and another wants, ascending; a rank may want some of its own again."""
        return joined(_meet(self.wanted[destination], self.runs[source]))

    @property
    def remote(self) -> int:
        """Tokens that come from other ranks, on the rank where they are most."""
        return max(
            sum(map(len, wanted)) - sum(map(len, self.sent(rank, rank))) for rank, wanted in enumerate(self.wanted)
        )

    @property
    def keys(self) -> int:
        """Keys that a rank's kernel call sees, those of a document once for each of its runs; the most of any rank."""
        return max(sum(run.stop - run.first for run in own) for own in self.runs)


def _runs(layout: Layout, rank: int, starts: Sequence[Sequence[int]], window: int | None) -> Iterator[Run]:
    """Cut what a rank holds at document borders; with a window, a run's first token sees so many at most."""
    numbered = 0
    for row, firsts in enumerate(starts):
        offset = row * layout.length
        for piece in joined(layout.ring_pieces(rank)):
            number = bisect_right(firsts, piece.start) - 1
            at = piece.start
            while at < piece.stop:
                end = firsts[number + 1] if number + 1 < len(firsts) else layout.length
                stop = min(end, piece.stop)
                first = firsts[number] if window is None else max(firsts[number], at - window + 1)
                yield Run(offset + at, offset + stop, offset + first, numbered + number)
                at, number = stop, number + 1
        numbered += len(firsts)


def _union(pieces: Iterator[Piece]) -> tuple[Piece, ...]:
    """Return the tokens of pieces, each once, ascending."""
    found: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.start, p.stop)):
        if found and piece.start <= found[-1].stop:
            found[-1] = Piece(found[-1].start, max(found[-1].stop, piece.stop))
        else:
            found.append(piece)
    return tuple(found)


def _meet(wanted: Sequence[Piece], held: Sequence[Run]) -> Iterator[Piece]:
    """Yield the tokens that are in both, ascending."""
    begins = [run.start for run in held]
    for piece in wanted:
        at = max(0, bisect_right(begins, piece.start) - 1)
        for run in held[at:]:
            if run.start >= piece.stop:
                break
            both = piece.meet(Piece(run.start, run.stop))
            if both is not None:
                yield both

"""Which tokens may see which: causal order, document borders, and the kernel calls that follow from them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from longspan.errors import BatchError
from longspan.layout import Piece


@dataclass(frozen=True)
class Block:
    """Say which keys each query of one kernel call sees.

    `causal` is bottom-right aligned: query i of Sq sees keys up to i + (Sk - Sq). Without it every query sees every
    key. With `cu_q` and `cu_k` (host integers, cumulative, one row) the same holds inside each segment, and segments
    never see each other. `cache` holds what a kernel derives from the borders (device tensors), so that it is made
    once per micro-batch and not once per layer.
    """

    causal: bool
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def varlen(self) -> bool:
        """Whether the call covers several segments."""
        return self.cu_q is not None

    @property
    def max_q(self) -> int:
        """Longest query segment, in tokens."""
        return _longest(self.cu_q)

    @property
    def max_k(self) -> int:
        """Longest key segment, in tokens."""
        return _longest(self.cu_k)


@dataclass(frozen=True)
class Work:
    """One kernel call: these rows, this slice of the queries at hand, this slice of the keys at hand."""

    rows: slice
    q: slice
    k: slice
    block: Block


@dataclass(frozen=True)
class Mask:
    """Describe who sees whom in a batch: causal, within documents.

    Args:
        length: tokens per row, padding included.
        documents: for each row the ascending first tokens of its documents, starting with 0; None when every row is
            one document. Padding belongs to the last document of its row: causal order hides it from real tokens.
    """

    length: int
    documents: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise BatchError(f"A mask needs at least one token per row, got length {self.length}.")
        for row, starts in enumerate(self.documents or ()):
            if not starts or starts[0] != 0 or starts[-1] >= self.length or any(a >= b for a, b in pairwise(starts)):
                raise BatchError(
                    f"Row {row}: document starts must rise from 0 and stay below the row's {self.length} tokens, "
                    f"got {list(starts[:8])}{' ...' if len(starts) > 8 else ''}."
                )

    @property
    def packed(self) -> bool:
        """Whether some row holds more than one document."""
        return any(len(starts) > 1 for starts in self.documents or ())

    def work(self, q: Sequence[Piece], k: Sequence[Piece]) -> tuple[Work, ...]:
        """List the kernel calls that attend from the tokens of `q` to the tokens of `k`.

        Args:
            q, k: ascending token ranges of a row, each held one after the other in the tensors of the call. A query
                range is one of the key ranges, or shares no token with them.

        Returns:
            Calls that cover each visible pair once; empty when nothing is visible. Rows that hold one document each
            share a call.

        Cost: O(documents with tokens on both sides), and O(log of all documents) per piece.
        """
        if not self.packed:
            return tuple(self._row(slice(None), (0,), q, k))
        assert self.documents is not None
        rows = enumerate(self.documents)
        return tuple(work for i, starts in rows for work in self._row(slice(i, i + 1), starts, q, k))

    def _row(self, rows: slice, starts: Sequence[int], q: Sequence[Piece], k: Sequence[Piece]) -> Iterator[Work]:
        """Yield the calls of rows with these documents."""
        squares: list[_Call] = []
        shared = _shared(q, k)
        for number in _numbers(starts, q, k):
            start, stop = starts[number], starts[number + 1] if number + 1 < len(starts) else self.length
            whole = [(at, from_k) for first, last, at, from_k in shared if first <= start and stop <= last]
            if whole:
                at, from_k = start + whole[0][0], start + whole[0][1]
                squares.append(_Call((at, at + stop - start), (from_k, from_k + stop - start), True))
                continue
            document = Piece(start, stop)
            for call in _document(_held(q, document), _held(k, document)):
                if call.square:
                    squares.append(call)
                else:
                    yield Work(rows, slice(*call.q), slice(*call.k), Block(call.causal))
        for run in _runs(squares):
            span_q, span_k = slice(run[0].q[0], run[-1].q[1]), slice(run[0].k[0], run[-1].k[1])
            if len(run) == 1:
                yield Work(rows, span_q, span_k, Block(causal=True))
            else:
                cu = (0, *(call.q[1] - run[0].q[0] for call in run))
                yield Work(rows, span_q, span_k, Block(True, cu, cu))


class _Call(NamedTuple):
    """Positions in the tensors at hand: queries `q` see keys `k`, causally (bottom-right) or all of them."""

    q: tuple[int, int]
    k: tuple[int, int]
    causal: bool

    @property
    def square(self) -> bool:
        return self.causal and self.q[1] - self.q[0] == self.k[1] - self.k[0]


def _numbers(starts: Sequence[int], q: Sequence[Piece], k: Sequence[Piece]) -> Iterator[int]:
    """Yield the number of each document that has a token among the queries and one among the keys, ascending."""
    for some in _met(starts, q):
        for others in _met(starts, k):
            both = some.meet(others)
            if both is not None:
                yield from range(both.start, both.stop)


def _met(starts: Sequence[int], pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield ranges of numbers of the documents that have a token in ascending pieces, each document once."""
    following = 0
    for piece in pieces:
        first = max(following, bisect_right(starts, piece.start) - 1)
        following = max(following, bisect_left(starts, piece.stop))
        yield Piece(first, following)


def _shared(q: Sequence[Piece], k: Sequence[Piece]) -> list[tuple[int, int, int, int]]:
    """Return the pieces that are in both: first and last token, and what leads from a token to its positions."""
    at_k = dict(_shifts(k))
    return [(piece.start, piece.stop, shift, at_k[piece]) for piece, shift in _shifts(q) if piece in at_k]


def _shifts(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    """Yield each piece with the position of its first token less that token."""
    offset = 0
    for piece in pieces:
        yield piece, offset - piece.start
        offset += len(piece)


def _held(pieces: Sequence[Piece], document: Piece) -> list[tuple[Piece, int]]:
    """Return the parts of `pieces` inside a document, each with its position in the tensor that holds the pieces."""
    met = [(piece.meet(document), shift) for piece, shift in _shifts(pieces)]
    return [(both, both.start + shift) for both, shift in met if both is not None]


def _document(q: list[tuple[Piece, int]], k: list[tuple[Piece, int]]) -> Iterator[_Call]:
    """Yield the calls of one document. Its tokens are contiguous in both tensors, as pieces ascend."""
    if q and [part for part, _ in q] == [part for part, _ in k]:
        size = sum(len(part) for part, _ in q)
        yield _Call((q[0][1], q[0][1] + size), (k[0][1], k[0][1] + size), causal=True)
        return
    last: _Call | None = None
    for part, at in q:
        seen = [(key, position) for key, position in k if key.start <= part.start]
        if not seen:
            continue
        key, position = seen[-1]
        call = _Call((at, at + len(part)), (seen[0][1], position + len(key)), causal=key == part)
        if last and not (last.causal or call.causal) and last.k == call.k and last.q[1] == call.q[0]:
            last = _Call((last.q[0], call.q[1]), call.k, causal=False)
            continue
        if last:
            yield last
        last = call
    if last:
        yield last


def _runs(squares: list[_Call]) -> Iterator[list[_Call]]:
    """Group calls that follow each other without a gap in both tensors."""
    run: list[_Call] = []
    for call in squares:
        if run and (run[-1].q[1] != call.q[0] or run[-1].k[1] != call.k[0]):
            yield run
            run = []
        run.append(call)
    if run:
        yield run


def _longest(cu: tuple[int, ...] | None) -> int:
    if cu is None:
        raise ValueError("A dense block has no segments.")
    return max(b - a for a, b in pairwise(cu))

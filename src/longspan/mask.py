"""Which tokens may see which: causal order, windows, document borders, and the kernel calls that follow from them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from longspan.errors import BatchError
from longspan.layout import Piece


@dataclass(frozen=True)
class Block:
    """Say which keys each query of one kernel call sees.

    `causal` is bottom-right aligned: query i of Sq sees keys up to i + (Sk - Sq). Without it every query sees every
    key. With `left`, query i also sees no key before i + (Sk - Sq) - left: the keys to the left of that diagonal end
    there. With `cu_q` and `cu_k` (host integers, cumulative, one row) the same holds inside each segment, and segments
    never see each other. `cache` holds what a kernel derives from the borders (device tensors), so that it is made
    once per micro-batch and not once per layer.

    Every query sees a key; where its place matters (`diagonal`), there are no more queries than keys.
    """

    causal: bool
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None
    left: int | None = None
    cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def varlen(self) -> bool:
        """Whether the call covers several segments."""
        return self.cu_q is not None

    @property
    def diagonal(self) -> bool:
        """Whether what a query sees depends on its place: causal order or a window."""
        return self.causal or self.left is not None

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

    def blocks(self, tokens: int) -> tuple[Work, ...]:
        """Divide a causal call into calls of at most so many keys each, or as many as it has queries.

        The first holds the queries' own keys. Calls of several segments, or without causal order, stay whole.
        """
        queries, keys = self.q.stop - self.q.start, self.k.stop - self.k.start
        if self.block.varlen or not self.block.causal or keys <= max(tokens, queries):
            return (self,)
        last = keys - max(queries, (keys - 1) % tokens + 1)
        window = keys if self.block.left is None else self.block.left + 1
        calls = (
            call
            for a, b in ((last, keys), *pairwise([*range(0, last, tokens), last]))
            for call in _seen(Piece(keys - queries, keys), self.q.start, Piece(a, b), self.k.start + a, window)
        )
        return tuple(
            Work(self.rows, slice(*call.q), slice(*call.k), Block(call.causal, left=call.left)) for call in calls
        )


@dataclass(frozen=True)
class Mask:
    """Describe who sees whom in a batch: causal, within documents, and within a window.

    Args:
        length: tokens per row, padding included.
        documents: for each row the ascending first tokens of its documents, starting with 0; None when every row is
            one document. Padding belongs to the last document of its row: causal order hides it from real tokens.
        window: tokens that each token sees at most, itself included, as in transformers; None for all before it.
    """

    length: int
    documents: tuple[tuple[int, ...], ...] | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise BatchError(f"A window holds at least the token itself, got {self.window} tokens.")
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

    def within(self, window: int | None) -> Mask:
        """Return this mask with another window; with none if the window is as long as every document."""
        rows = self.documents or ((0,),)
        shorter = window is not None and any(b - a > window for starts in rows for a, b in self._borders(starts))
        return replace(self, window=window if shorter else None)

    def meets(self, q: Piece, k: Piece) -> bool:
        """Whether some token of `q` sees one of `k`, all of which come before it: its first token and their last."""
        nearest = k.stop - 1
        if self.window is not None and q.start - nearest >= self.window:
            return False
        rows = self.documents or ((0,),)
        return any(bisect_right(starts, nearest) == bisect_right(starts, q.start) for starts in rows)

    def work(self, q: Sequence[Piece], k: Sequence[Piece]) -> tuple[Work, ...]:
        """List the kernel calls that attend from the tokens of `q` to the tokens of `k`.

        Args:
            q, k: ascending token ranges of a row, each held one after the other in the tensors of the call. A query
                range is one of the key ranges, or shares no token with them.

        Returns:
            Calls that cover each visible pair once; empty when nothing is visible. Rows that hold one document each
            share a call. A query whose own key is among the keys is in one causal call, which comes before all others.

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
        others: list[_Call] = []
        shared = _shared(q, k)
        for number in _numbers(starts, q, k):
            start, stop = starts[number], starts[number + 1] if number + 1 < len(starts) else self.length
            window = self.window if self.window is not None and self.window < stop - start else None
            whole = [(at, from_k) for first, last, at, from_k in shared if first <= start and stop <= last]
            if whole:
                at, from_k = start + whole[0][0], start + whole[0][1]
                left = None if window is None else window - 1
                squares.append(_Call((at, at + stop - start), (from_k, from_k + stop - start), True, left))
                continue
            held_q, held_k = (_held(pieces, Piece(start, stop)) for pieces in (q, k))
            for call in _document(held_q, held_k) if window is None else _windowed(held_q, held_k, window):
                (squares if call.square else others).append(call)
        for run in _runs(squares) if self.packed else ([call] for call in squares):  # several segments are one row
            span_q, span_k = slice(run[0].q[0], run[-1].q[1]), slice(run[0].k[0], run[-1].k[1])
            left = next((call.left for call in run if call.left is not None), None)  # shorter documents lie within it
            cu = (0, *(call.q[1] - run[0].q[0] for call in run)) if len(run) > 1 else None
            yield Work(rows, span_q, span_k, Block(True, cu, cu, left))
        for call in sorted(others, key=lambda call: not call.causal):
            yield Work(rows, slice(*call.q), slice(*call.k), Block(call.causal, left=call.left))

    def _borders(self, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield first and last (excluded) token of each document of a row."""
        return pairwise((*starts, self.length))


class _Call(NamedTuple):
    """Positions in the tensors at hand: queries `q` see keys `k`, as in a `Block` with `causal` and `left`."""

    q: tuple[int, int]
    k: tuple[int, int]
    causal: bool
    left: int | None = None

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


def _windowed(q: list[tuple[Piece, int]], k: list[tuple[Piece, int]], window: int) -> Iterator[_Call]:
    """Yield the calls of one document whose tokens see `window` tokens each.

    Keys that end with the queries' own are one call. Earlier keys are two: one of the queries that see all of them, so
    that it needs no mask, and one of those that see their end only, on no more keys than the first of these sees.
    """
    for part, at in q:
        for keys, position in _before(k, part):
            yield from _seen(part, at, keys, position, window)


def _seen(part: Piece, at: int, keys: Piece, position: int, window: int) -> Iterator[_Call]:
    """Yield the calls from the queries `part` at position `at` to keys that end with them, or before them."""

    def call(first: int, last: int, key: int, causal: bool, left: int | None = None) -> _Call:
        shift, shift_k = at - part.start, position - keys.start
        return _Call((first + shift, last + shift), (key + shift_k, keys.stop + shift_k), causal, left)

    if keys.stop == part.stop:
        first = max(keys.start, part.start - window + 1)
        yield call(part.start, part.stop, first, True, window - 1 if window < part.stop - first else None)
        return
    partial = min(part.stop, max(part.start, keys.start + window))  # the first query that does not see all of them
    blind = min(part.stop, keys.stop + window - 1)  # the first that sees none
    if part.start < partial:
        yield call(part.start, partial, keys.start, False)
    if partial < blind:
        first = partial - window + 1
        ahead = keys.stop - first - (blind - partial)
        yield call(partial, blind, first, False, ahead if blind - partial > 1 else None)


def _before(k: list[tuple[Piece, int]], part: Piece) -> list[tuple[Piece, int]]:
    """Return the keys up to the end of `part`, joined where they follow each other without a gap."""
    runs: list[tuple[Piece, int]] = []
    for key, position in k:
        if key.start > part.start:
            break
        if runs and runs[-1][0].stop == key.start:
            runs[-1] = (Piece(runs[-1][0].start, key.stop), runs[-1][1])
        else:
            runs.append((key, position))
    return runs


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

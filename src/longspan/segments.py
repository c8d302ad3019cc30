"""Which part of which document each ring rank holds: equal tokens, equal causal work, few keys that others need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, isqrt

from longspan.errors import TopologyError
from longspan.layout import Layout, Piece, Segment, joined

MOVE_PAIRS = 512
"""Pairs of a query and a key that are computed in the time in which one key and value travel: forward and backward of
grouped-query attention (4 queries to a key) at 600 TFLOP/s, three passes over a link of 300 GB/s. It weighs balance
against traffic; a factor of two either way changes few plans."""

BALANCED = 1.02
"""A plan with more work than this on its fullest rank, over the mean, is taken only where no other is below."""

_SHARES = (1.0, 0.8, 0.6, 0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.02)
"""Candidates: the share of a rank's work above which a document is cut over several ranks."""

_GOOD, _LEVELLED = 1.01, 1.005
"""Cost over perfect balance at which the search ends; balance that levelling aims at."""

_PARTNERS = 4
_LEVELLING_STEPS = 4
_LEVELLED_DOCUMENTS = 1000


def segment_layout(tokens: int, starts: Sequence[int], ring: int, ulysses: int = 1) -> Layout:
    """Divide a packed row over ring x ulysses ranks by its documents.

    The row is padded as for a zigzag; padding belongs to the last document.

    Args:
        tokens: of the row, without padding.
        starts: ascending first token of each document, the first being 0.

    Cost: milliseconds for hundreds of documents, on the host; pure and deterministic, so that every rank does it alone.
    """
    length = Layout(tokens, ring, ulysses).length
    plan = plan_segments([b - a for a, b in pairwise([*starts, length])], ring)
    pieces = ((Piece(starts[s.document] + s.start, starts[s.document] + s.stop) for s in own) for own in plan)
    return Layout(tokens, ring, ulysses, held=tuple(map(joined, pieces)))


def plan_segments(lengths: Sequence[int], ranks: int) -> tuple[tuple[Segment, ...], ...]:
    """Give each rank segments of documents: equal tokens, nearly equal causal work, and few keys from other ranks.

    Several divisions are drafted, which differ in how long a document must be to be cut; each is levelled where it is
    out of balance, and the one is taken whose fullest rank has least to compute and to receive.

    Args:
        lengths: tokens of each document, in their order; `ranks` divides their sum.

    Returns:
        For each rank its segments, ascending. One document over r ranks gives the zigzag.

    Raises:
        TopologyError: documents without tokens, or a number of tokens that the ranks cannot share.
    """
    total = sum(lengths)
    if ranks < 1 or not lengths or min(lengths) < 1 or total % ranks:
        raise TopologyError(
            f"{len(lengths)} documents of {total} tokens cannot be divided over {ranks} ranks: every document needs a "
            "token, and the ranks equal shares. Pad the last document."
        )
    if ranks == 1:
        return (tuple(Segment(i, 0, length) for i, length in enumerate(lengths)),)
    drafts: list[_Draft] = []
    for share in _SHARES:
        draft = _drafted(lengths, ranks, share)
        drafts.append(draft)
        if draft.cost <= _GOOD * draft.mean:
            break
    drafts.sort(key=lambda draft: draft.cost)
    for draft in drafts[: max(3, _LEVELLED_DOCUMENTS // len(lengths))]:
        if draft.imbalance > _GOOD:
            drafts.append(draft.levelled())
    best = min(drafts, key=lambda draft: (draft.imbalance > BALANCED, draft.cost))
    return tuple(tuple(_merged(sorted(own, key=lambda s: (s.document, s.start)))) for own in best.held)


def pairs(start: int, stop: int) -> int:
    """Return the pairs of a query and a key that a segment of a document computes under a causal mask."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def remote_tokens(segments: Sequence[Segment]) -> int:
    """Return the tokens whose keys a rank with these segments needs from others."""
    last: dict[int, int] = {}
    for segment in segments:
        last[segment.document] = max(last.get(segment.document, 0), segment.stop)
    return sum(last.values()) - sum(s.stop - s.start for s in segments)


@dataclass
class _Draft:
    """Segments of each rank while they are being placed.

    Args:
        room: tokens that each rank still takes.
        work: pairs that each rank computes.
        mean: pairs per rank of the whole row.
    """

    held: list[list[Segment]]
    room: list[int]
    work: list[int]
    mean: float

    @property
    def imbalance(self) -> float:
        """Most work of a rank over the mean."""
        return max(self.work) / self.mean

    @property
    def cost(self) -> float:
        """Most work of a rank, and most traffic of one, in pairs."""
        return max(self.work) + MOVE_PAIRS * max(map(remote_tokens, self.held))

    def density(self, rank: int) -> float:
        """Return the work per token that a rank still needs: documents are placed where the most is needed."""
        return (self.mean - self.work[rank]) / self.room[rank] if self.room[rank] else float("-inf")

    def put(self, rank: int, document: int, start: int, stop: int) -> None:
        """Give a rank a segment; nothing if it is empty."""
        if start < stop:
            self.held[rank].append(Segment(document, start, stop))
            self.room[rank] -= stop - start
            self.work[rank] += pairs(start, stop)

    def zigzag(self, document: int, length: int, ranks: Sequence[int]) -> None:
        """Cut a document over some ranks, which have room for it: each gets a head and a tail of like size."""
        shares, left = {}, length
        for count, rank in enumerate(sorted(ranks, key=lambda r: self.room[r])):
            shares[rank] = min(self.room[rank], left // (len(ranks) - count))
            left -= shares[rank]
        order = sorted(ranks, key=self.density)
        start = 0
        for rank in order:
            self.put(rank, document, start, start + shares[rank] // 2)
            start += shares[rank] // 2
        for rank in reversed(order):
            self.put(rank, document, start, start + shares[rank] - shares[rank] // 2)
            start += shares[rank] - shares[rank] // 2

    def spill(self, document: int, length: int) -> None:
        """Fill what room is left with a document: its cheap head where least work is needed."""
        start = 0
        for rank in sorted(range(len(self.room)), key=self.density):
            taken = min(self.room[rank], length - start)
            self.put(rank, document, start, start + taken)
            start += taken

    def levelled(self) -> _Draft:
        """Return a draft in which full and light ranks have swapped ends of documents, token for token."""
        draft = _Draft([list(own) for own in self.held], list(self.room), list(self.work), self.mean)
        for _ in range(_LEVELLING_STEPS * len(self.held)):
            if draft.imbalance <= _LEVELLED or not draft._swap():
                break
        return draft

    def _swap(self) -> bool:
        """Let the fullest rank give the last tokens of a segment for the first ones of a segment of the lightest."""
        full = max(range(len(self.work)), key=self.work.__getitem__)
        light = min(range(len(self.work)), key=self.work.__getitem__)
        wanted = int(min(self.work[full] - self.mean, self.mean - self.work[light]))
        offers = list(self._offers(full, light, wanted))
        if not offers:
            return False
        _, _, given, taken, count = min(offers, key=lambda offer: offer[:2])
        self.held[full].remove(given)
        self.held[light].remove(taken)
        for rank, segment in ((full, given), (light, taken)):
            self.room[rank] += segment.stop - segment.start
            self.work[rank] -= pairs(segment.start, segment.stop)
        self.put(full, given.document, given.start, given.stop - count)
        self.put(light, given.document, given.stop - count, given.stop)
        self.put(full, taken.document, taken.start, taken.start + count)
        self.put(light, taken.document, taken.start + count, taken.stop)
        return True

    def _offers(self, full: int, light: int, wanted: int) -> Iterator[tuple[bool, float, Segment, Segment, int]]:
        """Yield swaps: whether one moves too little work, keys that travel for each pair, what is given and taken."""
        reach: dict[int, int] = {}
        for segment in self.held[light]:
            reach[segment.document] = max(reach.get(segment.document, 0), segment.stop)
        partners = sorted(self.held[light], key=lambda s: (s.start, -s.stop, s.document))[:_PARTNERS]
        for given in self.held[full]:
            for taken in partners:
                ahead = given.stop - taken.start  # n tokens swapped move n * (ahead - n) pairs
                if taken.document == given.document or ahead < 2:
                    continue
                root = ahead * ahead - 4 * wanted
                count = (ahead - isqrt(root)) // 2 if root > 0 else ahead // 2
                count = min(max(count, 1), given.stop - given.start, taken.stop - taken.start)
                moved = count * (ahead - count)
                if moved <= 0:
                    continue
                keys = max(0, given.stop - count - reach.get(given.document, 0))
                keys += count if count < taken.stop - taken.start else 0
                yield 2 * moved < wanted, keys / moved, given, taken, count


def _drafted(lengths: Sequence[int], ranks: int, share: float) -> _Draft:
    """Place documents, the longest first: whole if they are short, else cut over as few ranks as their work needs."""
    mean = sum(pairs(0, length) for length in lengths) / ranks
    capacity = sum(lengths) // ranks
    draft = _Draft([[] for _ in range(ranks)], [capacity] * ranks, [0] * ranks, mean)
    rest = []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[document]
        parts = min(ranks, max(1, ceil(pairs(0, length) / (share * mean) - 1e-9)))
        if parts == 1:
            fits = [r for r in range(ranks) if draft.room[r] >= length]
            if fits:
                draft.put(max(fits, key=draft.density), document, 0, length)
            else:
                rest.append(document)
            continue
        open_ = sorted((r for r in range(ranks) if draft.room[r]), key=draft.density, reverse=True)
        while sum(draft.room[r] for r in open_[:parts]) < length:
            parts += 1
        draft.zigzag(document, length, open_[:parts])
    for document in rest:
        draft.spill(document, lengths[document])
    return draft


def _merged(segments: Sequence[Segment]) -> Iterator[Segment]:
    """Yield ascending segments, those that follow each other in a document as one."""
    last: Segment | None = None
    for segment in segments:
        if last and (last.document, last.stop) == (segment.document, segment.start):
            last = Segment(last.document, last.start, segment.stop)
            continue
        if last:
            yield last
        last = segment
    if last:
        yield last

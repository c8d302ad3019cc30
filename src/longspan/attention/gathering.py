"""Which keys a ring rank sends, receives and lays out for its kernel: indices made once per micro-batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from longspan.layout import Layout, Piece
from longspan.mask import Block, Mask
from longspan.needs import Needs, Run
from longspan.plan.exchange import chunks_of

_Range = tuple[int, int]
"""First index, and how many follow each other."""


@dataclass(frozen=True)
class Indices:
    """The indices of a `Gathering` on a device; positions are of this rank's tokens unless said otherwise.

    Args:
        sent: tokens that travel, in the order of their destinations.
        own: where the kernel's keys hold each of this rank's tokens.
        filled: where the kernel's keys hold received tokens, in levels, and which these are: a token stands at most
            once in a level, so that gradients add up in one order.
        shared: tokens that travel, each once; `slots`: for each destination, where those it got are among these.
    """

    sent: Tensor
    own: Tensor
    filled: tuple[tuple[Tensor, Tensor], ...]
    shared: Tensor
    slots: tuple[Tensor, ...]


@dataclass(frozen=True)
class Gathering:
    """The exchange and the kernel call of one ring rank, for all layers of a micro-batch.

    A rank may send to itself: a document of which it holds a head and a tail needs the head's keys twice.

    Args:
        rows: of the batch; tokens of all rows are numbered one after the other.
        keys: of the kernel call, those that several runs of a document need once for each run.
        sends, receives: tokens to and from each ring rank.
        moves: whether any rank needs anything of another; without that nobody exchanges anything.
        chunks: in how many parts the KV heads travel, if there are enough of them.
    """

    rows: int
    keys: int
    block: Block
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    moves: bool
    chunks: int
    _ranges: _Ranges = field(repr=False, compare=False)
    _devices: dict[torch.device, Indices] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, mask: Mask, layout: Layout, ring_rank: int, rows: int = 1) -> Gathering:
        """Work out a rank's part. Pure.

        Cost: O(documents x log + ring degree) on the host.
        """
        needs = Needs.of(mask, layout, rows)
        runs, ranks = needs.runs[ring_rank], range(layout.ring)
        sent = [needs.sent(ring_rank, other) for other in ranks]
        received = [needs.sent(other, ring_rank) for other in ranks]
        cu_q = tuple(accumulate((run.stop - run.start for run in runs), initial=0))
        cu_k = tuple(accumulate((run.stop - run.first for run in runs), initial=0))
        left = None if mask.window is None else mask.window - 1
        return cls(
            rows=needs.shard * layout.ring // layout.length,
            keys=cu_k[-1],
            block=Block(True, left=left) if len(runs) == 1 else Block(True, cu_q, cu_k, left),
            sends=tuple(sum(map(len, pieces)) for pieces in sent),
            receives=tuple(sum(map(len, pieces)) for pieces in received),
            moves=any(map(bool, needs.wanted)),
            chunks=chunks_of(needs),
            _ranges=_Ranges(runs, cu_q, cu_k, sent, received),
        )

    @property
    def repacks(self) -> bool:
        """Whether the kernel's keys are others than this rank's own tokens in their order."""
        return bool(sum(self.receives))

    def spans(self, kv_heads: int) -> list[slice]:
        """Return the KV heads of each chunk."""
        count = min(self.chunks, kv_heads)
        return [slice(i * kv_heads // count, (i + 1) * kv_heads // count) for i in range(count)]

    def on(self, device: torch.device) -> Indices:
        """Return the indices on a device. Cost: one copy to the device at first use."""
        if device not in self._devices:
            self._devices[device] = self._ranges.indices(device)
        return self._devices[device]


@dataclass(frozen=True)
class _Ranges:
    """What the indices of a gathering are made of."""

    runs: Sequence[Run]
    cu_q: Sequence[int]
    cu_k: Sequence[int]
    sent: Sequence[Sequence[Piece]]
    received: Sequence[Sequence[Piece]]

    @cached_property
    def _starts(self) -> list[int]:
        return [run.start for run in self.runs]

    def indices(self, device: torch.device) -> Indices:
        """Make all indices, and copy them to a device in one piece."""
        sent = [_index([self._held(piece) for piece in pieces]) for pieces in self.sent]
        everything = torch.cat(sent)
        shared = everything.unique()
        slots = [torch.searchsorted(shared, index) for index in sent]
        own = _index([(end - (b - a), b - a) for (a, b), end in zip(pairwise(self.cu_q), self.cu_k[1:], strict=True)])
        levels = [(_index(at), _index(source)) for at, source in self._levels]
        flat = [everything, own, shared, *slots, *(index for level in levels for index in level)]
        moved = torch.cat(flat).to(device, non_blocking=True).split([len(index) for index in flat])
        filled = moved[3 + len(slots) :]
        return Indices(
            sent=moved[0],
            own=moved[1],
            filled=tuple(zip(filled[::2], filled[1::2], strict=True)),
            shared=moved[2],
            slots=moved[3 : 3 + len(slots)],
        )

    def _held(self, piece: Piece) -> _Range:
        """Return where this rank holds some of its tokens, which follow each other in one or several runs."""
        number = bisect_right(self._starts, piece.start) - 1
        return self.cu_q[number] + piece.start - self.runs[number].start, len(piece)

    @cached_property
    def _levels(self) -> list[tuple[list[_Range], list[_Range]]]:
        """Return ranges of the kernel's keys and of the received tokens that they hold, in levels.

        The n-th of a document's runs that need other keys than their own is in level n.
        """
        pieces = [piece for source in self.received for piece in source]
        at = accumulate(map(len, pieces), initial=0)
        known = sorted((piece.start, piece.stop, where) for piece, where in zip(pieces, at, strict=False))
        starts = [start for start, _, _ in known]
        levels: list[tuple[list[_Range], list[_Range]]] = []
        seen: dict[int, int] = {}
        for run, position in zip(self.runs, self.cu_k, strict=False):
            if run.first == run.start:
                continue
            level = seen[run.document] = seen.get(run.document, -1) + 1
            if level == len(levels):
                levels.append(([], []))
            token = run.first
            while token < run.start:
                start, stop, where = known[bisect_right(starts, token) - 1]
                count = min(stop, run.start) - token
                levels[level][0].append((position, count))
                levels[level][1].append((where + token - start, count))
                token, position = token + count, position + count
        return levels


def _index(ranges: Sequence[_Range]) -> Tensor:
    """Return the indices of ranges, one after the other."""
    if not ranges:
        return torch.empty(0, dtype=torch.long)
    starts, counts = torch.tensor(ranges, dtype=torch.long).T
    before = counts.cumsum(0) - counts
    return torch.arange(int(counts.sum())) + (starts - before).repeat_interleave(counts)

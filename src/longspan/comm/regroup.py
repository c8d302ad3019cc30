"""The exchange of recurrences: a shard with all heads, whatever its layout, for a stretch of a row with some heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.pending import EXCHANGE
from longspan.layout import Layout, Piece
from longspan.mesh import Axis


@dataclass(frozen=True)
class Regroup:
    """Which tokens and heads each rank of an axis works on, and the all-to-all that brings them there and back.

    The ranks form `stretches` groups, each with a contiguous part of a row, in order; the ranks of a group divide the
    heads in contiguous runs, the first ones taking one more if uneven. With heads enough for all ranks there is one
    group, and each rank has whole rows.

    Args:
        layout: how the ranks of the axis hold rows.
        halo: tokens before its own part that a rank is given besides.
    """

    layout: Layout
    axis: Axis
    heads: int
    halo: int

    @cached_property
    def groups(self) -> int:
        """Ranks that divide the heads of one stretch."""
        return groups_of(self.heads, self.axis.size)

    @property
    def stretches(self) -> int:
        """Parts that a row is divided into."""
        return self.axis.size // self.groups

    @property
    def stretch(self) -> int:
        """Number of this rank's part."""
        return self.axis.rank // self.groups

    def piece(self, stretch: int) -> Piece:
        """Return the tokens of a stretch."""
        tokens = self.layout.length // self.stretches
        return Piece(stretch * tokens, (stretch + 1) * tokens)

    def run(self, rank: int) -> range:
        """Return the heads that a rank works on."""
        small, extra = divmod(self.heads, self.groups)
        number = rank % self.groups
        start = small * number + min(number, extra)
        return range(start, start + small + (number < extra))

    def to_stretch(self, x: Tensor, halo: bool = False) -> Tensor:
        """Exchange a shard x [B, s, heads, F] for [B, T, heads of this rank, F], tokens in the order of the row.

        Args:
            halo: whether the tokens before the stretch come first; where the row begins there are fewer of them.

        Cost: one all-to-all; a copy to send, and one more to put tokens in order where they are not.
        """
        if self.axis.size == 1:
            return x
        batch, width, own = x.shape[0], x.shape[3], self.run(self.axis.rank)
        parts = [
            x[:, span.first : span.stop, run.start : run.stop].transpose(0, 1).reshape(-1)
            for span, run in self._receivers(halo)
        ]
        counts = [span.stop - span.first for span in self._senders(halo)]
        received = self._exchange(parts, [count * batch * len(own) * width for count in counts])
        rows = received.view(-1, batch, len(own), width)
        order = self._order(x.device, halo)
        return (rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)).transpose(0, 1)

    def to_shard(self, y: Tensor, halo: bool = False) -> Tensor:
        """Exchange y [B, T, heads of this rank, F] for a shard [B, s, heads, F]: the transpose of `to_stretch`.

        Args:
            halo: whether y begins with the tokens before the stretch; what they got is added to what they got in the
                stretch they belong to.

        Cost: as `to_stretch`.
        """
        if self.axis.size == 1:
            return y
        batch, width = y.shape[0], y.shape[3]
        rows, order = y.transpose(0, 1), self._order(y.device, halo)
        rows = rows if order is None else rows.index_select(0, order)
        counts = [span.stop - span.first for span in self._senders(halo)]
        sizes = [(span.stop - span.first) * batch * len(run) * width for span, run in self._receivers(halo)]
        received = self._exchange([part.reshape(-1) for part in rows.split(counts)], sizes).split(sizes)
        out = y.new_empty(batch, self.layout.shard_tokens, self.heads, width)
        extra: list[tuple[Tensor, Tensor]] = []
        for block, (span, run) in zip(received, self._receivers(halo), strict=True):
            tokens, before = block.view(-1, batch, len(run), width).transpose(0, 1), span.own - span.first
            out[:, span.own : span.stop, run.start : run.stop] = tokens[:, before:]
            extra.append((out[:, span.first : span.own, run.start : run.stop], tokens[:, :before]))
        for place, tokens in extra:
            place += tokens
        return out

    def states_before(self, state: Tensor) -> list[Tensor]:
        """Return the states of all earlier stretches, for the same heads; this rank's own goes to all later ones.

        Cost: one all-to-all of at most `stretches - 1` states.
        """
        later, earlier = self._peers(), self._peers(earlier=True)
        sent = [state.reshape(-1) if rank in later else state.new_empty(0) for rank in range(self.axis.size)]
        sizes = [state.numel() if rank in earlier else 0 for rank in range(self.axis.size)]
        received = self._exchange(sent, sizes).split(sizes)
        return [received[rank].view(state.shape) for rank in earlier]

    def states_after(self, states: Sequence[Tensor], like: Tensor) -> Tensor:
        """Return the sum of what all later stretches have for this one, given what this one has for each earlier one:
        the transpose of `states_before`.

        Args:
            like: a tensor of the shape of one of them.

        Cost: as `states_before`.
        """
        later, earlier = self._peers(), self._peers(earlier=True)
        given = dict(zip(earlier, states, strict=True))
        sent = [given[rank].reshape(-1) if rank in given else like.new_empty(0) for rank in range(self.axis.size)]
        sizes = [like.numel() if rank in later else 0 for rank in range(self.axis.size)]
        received = self._exchange(sent, sizes).split(sizes)
        return sum((received[rank].view(like.shape) for rank in later), torch.zeros_like(like))

    def _exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        sent = torch.cat(list(parts))
        received = sent.new_empty(sum(sizes))
        with self.axis.waits.span(EXCHANGE):
            dist.all_to_all_single(received, sent, list(sizes), [part.numel() for part in parts], self.axis.group)
        return received

    def _peers(self, earlier: bool = False) -> list[int]:
        """Return the ranks with this rank's heads in later, or in earlier, stretches."""
        number = self.axis.rank % self.groups
        stretches = range(self.stretch) if earlier else range(self.stretch + 1, self.stretches)
        return [stretch * self.groups + number for stretch in stretches]

    def _receivers(self, halo: bool) -> list[tuple[_Span, range]]:
        """Return, for each rank, the part of this rank's shard that it is given, and its heads."""
        spans = self._spans[halo][self.axis.rank]
        return [(spans[rank // self.groups], self.run(rank)) for rank in range(self.axis.size)]

    def _senders(self, halo: bool) -> list[_Span]:
        """Return, for each rank, the part of its shard that this rank is given."""
        return [spans[self.stretch] for spans in self._spans[halo]]

    @cached_property
    def _spans(self) -> dict[bool, list[list[_Span]]]:
        """Which part of each rank's shard each stretch is given; it is one run, as shards are in the order of rows."""
        held = [self.layout.pieces(rank) for rank in range(self.axis.size)]
        stretches = [self.piece(stretch) for stretch in range(self.stretches)]
        return {
            halo: [
                [
                    _Span(*(_position(pieces, at) for at in (part.start - halo * self.halo, part.start, part.stop)))
                    for part in stretches
                ]
                for pieces in held
            ]
            for halo in (False, True)
        }

    @cached_property
    def _orders(self) -> dict[tuple[torch.device, bool], Tensor | None]:
        return {}

    def _order(self, device: torch.device, halo: bool) -> Tensor | None:
        """Return where in the stretch each token stands that arrives, in the order of ranks; None if in order."""
        if (device, halo) not in self._orders:
            own = self.piece(self.stretch)
            whole = Piece(max(0, own.start - halo * self.halo), own.stop)
            ranges = [
                torch.arange(both.start - whole.start, both.stop - whole.start)
                for rank in range(self.axis.size)
                for piece in self.layout.pieces(rank)
                if (both := piece.meet(whole)) is not None
            ]
            order = torch.cat(ranges)
            in_order = torch.equal(order, torch.arange(len(order)))
            self._orders[device, halo] = None if in_order else order.to(device)
        return self._orders[device, halo]


def groups_of(heads: int, size: int) -> int:
    """Return how many of `size` ranks divide the heads: the most that divide `size` and find a head each."""
    return max(n for n in range(1, min(heads, size) + 1) if size % n == 0)


@dataclass(frozen=True)
class _Span:
    """Positions in a shard: the first that a stretch is given, the first of its own, and the one after the last."""

    first: int
    own: int
    stop: int


def _position(pieces: Sequence[Piece], token: int) -> int:
    """Return how many tokens of a shard stand before a token of the row."""
    return sum(max(0, min(token, piece.stop) - piece.start) for piece in pieces)

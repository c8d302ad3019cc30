"""Layers whose hidden states are rebuilt, in backward, from those of the nearest earlier layer that has them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from longspan.errors import ModelError, TrainingError
from longspan.keep import Keep
from longspan.plan.kept import Tier
from longspan.stream.passage import Passage
from longspan.weights import under_zero3

if TYPE_CHECKING:
    from longspan.stream.function import Mixing

T = TypeVar("T")


@dataclass
class State:
    """What a layer's backward needs: its hidden states, and what its mixing kept, as `keep` says.

    Args:
        own: whether nobody else holds x: it was brought back for this, or rebuilt.
    """

    x: Tensor
    kept: tuple[Tensor, ...]  # as the stash has them
    keep: Keep
    own: bool


@dataclass
class Member:
    """A layer of a segment, with what it keeps now.

    Args:
        index: of the layer in the model.
        x: what stands for its hidden states, if it has them; `kept` for what its mixing kept.
        again: whether its attention was run again.
        taken: whether its backward has begun.
    """

    index: int
    layer: nn.Module
    mixing: Mixing
    keep: Keep
    x: tuple[Tensor, ...] = ()
    kept: tuple[Tensor, ...] = ()
    again: bool = False
    taken: bool = False


class Segment:
    """Consecutive layers of one forward pass, of which at first only the first has its hidden states.

    A layer's hidden states are rebuilt from the nearest earlier layer that has them, by running the layers in between.
    Where these have their attention output, it is injected and attention does not run; where they do not, it runs
    again, and they keep what `Memory.rebuilt` says, until their own backward. So each layer that keeps nothing attends
    twice in all, as with plain checkpointing, or once more if it keeps nothing the first time it is rebuilt either.

    The same layers run again on every rank, as what they keep is the same there: running them repeats their exchanges.
    """

    def __init__(self, passage: Passage) -> None:
        self.passage = passage
        self.members: list[Member] = []
        self.end = (0, 0)

    def follows(self, x: Tensor) -> bool:
        """Whether these hidden states are what the last member returned, unchanged since."""
        return _identity(x) == self.end

    def add(self, member: Member, y: Tensor) -> int:
        """Append a layer that returned y; return its position."""
        self.members.append(member)
        self.end = _identity(y)
        position, this = len(self.members) - 1, weakref.ref(self)
        self.passage.expect(member.index, lambda: _fetch(this(), position))
        return position

    def take(self, position: int) -> State:
        """Return what a layer's backward needs, once, and keep it no longer."""
        member, start = self.members[position], self._start(position)
        if member.taken or start is None:
            raise TrainingError("Layers that are rebuilt can be differentiated once per forward pass.")
        stash = self.passage.stash
        with torch.no_grad():
            own = start < position or stash.away(*self.members[start].x)
            (x,) = stash.get(self.members[start].x)
            for p, tier in zip(range(start, position), self._tiers(start, position, x), strict=True):
                x = self._advance(p, x, tier)
            state = State(x, member.kept, member.keep, own)
        member.x, member.kept, member.taken = (), (), True
        return state

    def fetch(self, position: int) -> None:
        """Start bringing back what `take` needs first."""
        start = self._start(position)
        if start is not None:
            first = self.members[start]
            self.passage.stash.fetcher((*first.x, *first.kept))()

    def _start(self, position: int) -> int | None:
        """Return the nearest layer, not after this one, that has its hidden states."""
        return next((p for p in range(position, -1, -1) if self.members[p].x), None)

    def _advance(self, position: int, x: Tensor, tier: Tier) -> Tensor:
        """Run a layer again on its hidden states; return the next one's."""
        member, stash = self.members[position], self.passage.stash
        stash.fetcher(member.kept)()
        stash.fetcher(self.members[position + 1].kept)()  # wanted next
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if member.keep.has_out:
            gathered(member.layer, lambda: member.mixing.replay(x, member.kept, y))
            return y
        keep = self._again(member)
        kept = gathered(member.layer, lambda: member.mixing.forward(x, y, keep))
        gains_x = keep.has_x and not member.x
        stood = stash.put((x, *kept) if gains_x else kept, tier)
        if gains_x:
            member.x, stood = stood[:1], stood[1:]
        member.keep, member.kept, member.again = keep, stood, True
        return y

    def _again(self, member: Member) -> Keep:
        """Return what a layer without attention output keeps once it has been run again."""
        return Keep.X_O if member.again else self.passage.memory.again(member.index, member.keep)

    def _tiers(self, start: int, stop: int, x: Tensor) -> Sequence[Tier]:
        """Choose where what these layers keep goes, once they have been run again."""
        sizes = []
        for member in self.members[start:stop]:
            keep, had = self._again(member), Keep.X if member.x else Keep.NONE
            more = self.passage.bytes(member.index, keep, x) - self.passage.bytes(member.index, had, x)
            sizes.append(0 if member.keep.has_out else more)
        return self.passage.assign(sizes)


class Passing(Protocol):
    """What the layers of one forward pass share.

    Args:
        segment: the one that the layers at hand are in.
    """

    passage: Passage
    segment: Segment | None


@dataclass(frozen=True)
class Pass:
    """One forward pass of one layer.

    Args:
        index: of the layer in the model.
        opens: whether the next layer keeps no hidden states, so that this one starts a segment.
        shared: where the segment at hand is; a layer that opens one puts it there.
    """

    layer: nn.Module
    index: int
    mixing: Mixing
    keep: Keep
    opens: bool
    shared: Passing

    @property
    def passage(self) -> Passage:
        """What the layers of this forward pass keep."""
        return self.shared.passage

    def remember(
        self, x: Tensor, kept: tuple[Tensor, ...], y: Tensor
    ) -> tuple[Segment | None, int, tuple[Tensor, ...]]:
        """Put away what the layer keeps -> its segment and its place there, or tensors that it must hold itself."""
        segment = self._segment(x)
        stood = self.passage.put(self.index, x, (x, *kept) if self.keep.has_x else kept)
        if segment is None:
            self.passage.expect(self.index, self.passage.stash.fetcher(stood))
            return None, 0, stood
        count = int(self.keep.has_x)
        member = Member(self.index, self.layer, self.mixing, self.keep, stood[:count], stood[count:])
        return segment, segment.add(member, y), ()

    def _segment(self, x: Tensor) -> Segment | None:
        """Return the segment that the layer belongs to, if it does."""
        if self.opens:
            self.shared.segment = Segment(self.passage)
        elif not self.keep.rebuilds:
            return None
        segment = self.shared.segment
        if segment is None or not (self.opens or segment.follows(x)):
            raise ModelError(
                f"A {type(self.layer).__name__} that keeps no hidden states was not given what the layer before it "
                "returned, so they cannot be rebuilt; let it keep them."
            )
        return segment


def _fetch(segment: Segment | None, position: int) -> None:
    if segment is not None:
        segment.fetch(position)


def _identity(t: Tensor) -> tuple[int, int]:
    """Return where a tensor lies, and how often it was written to."""
    return t.data_ptr(), t._version


def gathered(layer: nn.Module, run: Callable[[], T]) -> T:
    """Run part of a layer's work outside its own forward and backward, with whole parameters.

    Cost: under FSDP2 and ZeRO-3 one all-gather.
    """
    if any(map(under_zero3, layer.parameters())):
        return _called(layer, run)
    if not isinstance(layer, FSDPModule):
        return run()
    layer.unshard()
    try:
        return run()
    finally:
        layer.reshard()


def _called(layer: nn.Module, run: Callable[[], T]) -> T:
    """Run something as a layer's forward: around a call, its hooks gather and release its parameters."""
    results: list[T] = []
    forward = vars(layer)["forward"]
    layer.forward = lambda: results.append(run())
    try:
        layer()
    finally:
        layer.forward = forward
    return results[0]

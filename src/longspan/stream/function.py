"""One autograd function per streamed layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.plan.keep import Keep
from longspan.stream.passage import Passage
from longspan.stream.run import Gradients, LayerRun
from longspan.stream.segment import Member, Segment, State
from longspan.tiling import first_order, private_graph


class Mixing(ABC):
    """How the tiles of a layer attend to each other; made anew for each forward pass."""

    run: LayerRun

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor | None, keep: Keep) -> tuple[Tensor, ...]:
        """Run the layer on x [B, s, d] and fill y, or run it up to its attention; return what `keep` says besides x."""

    @abstractmethod
    def replay(self, x: Tensor, kept: tuple[Tensor, ...], y: Tensor) -> None:
        """Fill y from what an earlier forward kept, its attention output included."""

    @abstractmethod
    def backward(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep, gradients: Gradients) -> None:
        """Add the layer's gradients to `gradients`."""


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


class StreamedLayer(torch.autograd.Function):
    """Runs a layer tile by tile; parameters are inputs, so that each gets its gradient once, after the last tile."""

    @staticmethod
    def forward(
        ctx: Any, run: Pass, differentiable: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        routing = run.mixing.run.routing
        with nullcontext() if routing is None else routing.forward():
            kept = run.mixing.forward(x, y, run.keep)
        if differentiable:
            ctx.run, ctx.parameters = run, parameters
            ctx.segment, ctx.position, held = run.remember(x, kept, y)
            ctx.save_for_backward(*held)
        if routing is None or routing.total is None:
            return y
        ctx.mark_non_differentiable(routing.total.counts)
        return y, *routing.total

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor, *d_choices: Tensor) -> tuple[Tensor | None, ...]:
        run: Pass = ctx.run
        run.passage.stash.settle()
        if ctx.segment is None:
            x, *kept = run.passage.stash.get(ctx.saved_tensors)
            state = State(x, tuple(kept), run.keep)
        else:
            state = ctx.segment.take(ctx.position)
        run.passage.ahead(run.index)
        gradients = Gradients(state.x, dy, ctx.parameters, ctx.needs_input_grad[2], d_choices[:1])
        with private_graph(ctx.parameters):
            run.mixing.backward(state.x, state.kept, state.keep, gradients)
        return None, None, gradients.dx, *gradients.sums.rounded([p.dtype for p in ctx.parameters])

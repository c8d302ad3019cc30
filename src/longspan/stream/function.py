"""One autograd function per streamed layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from longspan.keep import Keep
from longspan.stream.gradients import Gradients
from longspan.stream.run import LayerRun
from longspan.stream.segment import Pass, State
from longspan.stream.stash import Stash
from longspan.tiling import first_order, private_graph


class Mixing(ABC):
    """How the tiles of a layer attend to each other; made anew for each forward pass.

    What is kept is given back as what stands for it in the stash; a mixing brings it back when it needs it.
    """

    run: LayerRun
    stash: Stash
    by_tile: bool
    """Whether backward is done with a tile before it comes to the last one, so that its dx can take the place of x."""

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor | None, keep: Keep) -> tuple[Tensor, ...]:
        """Run the layer on x [B, s, d] and fill y, or run it up to its attention; return what `keep` says besides x."""

    @abstractmethod
    def replay(self, x: Tensor, kept: tuple[Tensor, ...], y: Tensor) -> None:
        """Fill y from what an earlier forward kept, its attention output included."""

    @abstractmethod
    def backward(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep, gradients: Gradients) -> None:
        """Add the layer's gradients to `gradients`."""


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
        total = None if routing is None else routing.taken()
        if total is None:
            return y
        ctx.mark_non_differentiable(total.counts)
        return y, *total

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor, *d_choices: Tensor) -> tuple[Tensor | None, ...]:
        run: Pass = ctx.run
        run.passage.stash.settle()
        if ctx.segment is None:
            first, *kept = ctx.saved_tensors
            own = run.passage.stash.away(first)
            (x,) = run.passage.stash.get((first,))
            state = State(x, tuple(kept), run.keep, own)
            del first, kept, x
        else:
            state = ctx.segment.take(ctx.position)
        run.passage.ahead(run.index)
        in_place = state.own and run.mixing.by_tile
        gradients = Gradients(state.x, dy, ctx.parameters, ctx.needs_input_grad[2], d_choices[:1], in_place)
        with private_graph(ctx.parameters):
            run.mixing.backward(state.x, state.kept, state.keep, gradients)
        return None, None, gradients.dx, *gradients.sums.rounded([p.dtype for p in ctx.parameters])

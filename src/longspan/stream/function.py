"""One autograd function per streamed layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.call import Call, Request
from longspan.errors import ModelError
from longspan.layout import Piece
from longspan.stream.arguments import Arguments
from longspan.stream.calls import Capture, Inject, StopLayer
from longspan.tiling import Ambient, GradientSum, private_graph


@dataclass(frozen=True)
class LayerRun:
    """One forward pass of a layer, remembered until its backward: how to run it on any of its tiles, as then.

    Args:
        forward: the layer's own forward.
        draws: whether something in the layer draws random numbers; each tile then replays its own.
    """

    forward: Callable[..., Any]
    arguments: Arguments
    tiles: tuple[Piece, ...]
    draws: bool
    ambients: dict[int, Ambient] = field(default_factory=dict)

    def tile(self, index: int, x: Tensor, call: Call) -> Tensor | None:
        """Run the layer on a tile x [B, t, d] -> [B, t, d], or None if the call stopped it."""
        at = self.tiles[index]
        with self._ambient(index, x.device):
            try:
                return self.arguments.run(self.forward, x, at.start, at.stop, call)
            except StopLayer:
                return None

    def captured(self, index: int, x: Tensor) -> Request:
        """Run the layer on a tile up to its attention call."""
        call = Capture()
        self.tile(index, x, call)
        if call.request is None:
            raise ModelError("A streamed layer ended without calling attention.")
        return call.request

    def rewind(self) -> None:
        """Put the generators back where the first tile began, which then counts as not yet run.

        A layer whose tiles run twice in forward leaves the generators where one whole run of its first tile does, so
        that a single tile draws exactly what the plain layer draws.
        """
        if self.draws:
            self.ambients.pop(0).rewind()

    @contextmanager
    def _ambient(self, index: int, device: torch.device) -> Iterator[None]:
        """Compute as in the tile's first run: the same autocast and random numbers.

        The first tile draws from the generators as they stand; each other tile from fresh ones, seeded from these.
        """
        if index == 0 and index not in self.ambients:
            self.ambients[0] = Ambient.capture(device, self.draws)
            yield
            return
        if index not in self.ambients:
            self.ambients[index] = self.ambients[0].reseeded(index) if self.draws else self.ambients[0]
        with self.ambients[index].restored():
            yield


class Mixing(ABC):
    """How the tiles of a layer attend to each other; made anew for each forward pass."""

    run: LayerRun

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Run the layer on x [B, s, d], fill y, and return the tensors that backward needs besides x."""

    @abstractmethod
    def backward(self, x: Tensor, kept: tuple[Tensor, ...], gradients: Gradients) -> None:
        """Add the layer's gradients to `gradients`."""


class Gradients:
    """Gradients of one layer pass: of its hidden states, tile by tile, and of its parameters over all tiles."""

    def __init__(self, x: Tensor, dy: Tensor, parameters: tuple[Tensor, ...], need_x: bool) -> None:
        self.x, self.dy, self.parameters, self.need_x = x, dy, parameters, need_x
        self.dx = torch.zeros_like(x, memory_format=torch.contiguous_format) if need_x else None
        self.sums = GradientSum(len(parameters))

    def leaf(self, at: Piece) -> Tensor:
        """Return a tile of the hidden states to differentiate."""
        return self.x[:, at.start : at.stop].detach().requires_grad_(self.need_x)

    def add(
        self, at: Piece, leaf: Tensor, outs: Sequence[Tensor], douts: Sequence[Tensor], *more: Tensor, again: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Differentiate a tile's outputs and add what belongs to the hidden states and parameters.

        Args:
            more: further leaves; their gradients are returned.
            again: keep the graph, as another part of it will be differentiated.
        """
        pairs = [(out, dout) for out, dout in zip(outs, douts, strict=True) if out.requires_grad]
        if not pairs:
            return (None,) * len(more)
        inputs = [*([leaf] if self.need_x else []), *more, *self.parameters]
        grads = list(
            torch.autograd.grad(
                [out for out, _ in pairs], inputs, [d for _, d in pairs], allow_unused=True, retain_graph=again
            )
        )
        if self.need_x:
            dx = grads.pop(0)
            if dx is not None and self.dx is not None:
                self.dx[:, at.start : at.stop] += dx
        self.sums.add(grads[len(more) :])
        return tuple(grads[: len(more)])


def inject(run: LayerRun, index: int, gradients: Gradients, out: Tensor) -> tuple[Tensor, Request, Tensor]:
    """Run a tile with its attention output known, and differentiate what follows attention.

    Args:
        out: [B, t, H, Dv] of this rank's tokens.

    Returns:
        The gradient of `out`; the request with the graph of q, k and v; the leaf they were made from.
    """
    at = run.tiles[index]
    leaf, known = gradients.leaf(at), out.detach().requires_grad_()
    call = Inject(known)
    y = run.tile(index, leaf, call)
    assert y is not None and call.request is not None
    (dout,) = gradients.add(at, leaf, [y], [gradients.dy[:, at.start : at.stop]], known, again=True)
    return torch.zeros_like(known) if dout is None else dout, call.request, leaf


class StreamedLayer(torch.autograd.Function):
    """Runs a layer tile by tile; parameters are inputs, so that each gets its gradient once, after the last tile."""

    @staticmethod
    def forward(ctx: Any, mixing: Mixing, keep: bool, x: Tensor, *parameters: Tensor) -> Tensor:
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        kept = mixing.forward(x, y)
        if keep:
            ctx.mixing, ctx.parameters = mixing, parameters
            ctx.save_for_backward(x, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *kept = ctx.saved_tensors
        gradients = Gradients(x, dy, ctx.parameters, ctx.needs_input_grad[2])
        with private_graph(ctx.parameters):
            ctx.mixing.backward(x, tuple(kept), gradients)
        sums = (None if g is None else g.to(p.dtype) for g, p in zip(gradients.sums.sums, ctx.parameters, strict=True))
        return None, None, gradients.dx, *sums

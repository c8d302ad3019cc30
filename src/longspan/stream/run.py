"""One forward pass of a layer, remembered: how to run any of its tiles again, and to differentiate it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan.attention.call import Request
from longspan.layout import Piece
from longspan.stream.arguments import Arguments
from longspan.stream.calls import Answer
from longspan.stream.compiled import CompiledHalves
from longspan.stream.gradients import Gradients
from longspan.stream.halves import ROUTING, Halves
from longspan.stream.routing import Choices, TileRouting
from longspan.stream.settings import Settings
from longspan.tiling import Ambient


@dataclass(frozen=True)
class LayerRun:
    """One forward pass of a layer, remembered until its backward: how to run it on any of its tiles, as then.

    Args:
        halves: the layer's code before and after its attention.
        draws: whether something in the layer may draw random numbers; each tile then replays its own.
        names: what the caller of the model passed, and layers only hand on.
        settings: of the layer, as they are now.
        routing: the layer's gates, if they are listened to.
    """

    halves: Halves
    arguments: Arguments
    tiles: tuple[Piece, ...]
    draws: bool
    names: frozenset[str]
    settings: Settings
    ambients: dict[int, Ambient] = field(default_factory=dict)
    routing: TileRouting | None = None

    def through(self, index: int, x: Tensor, answer: Answer) -> Tensor:
        """Run a tile x [B, t, d] in one go, with attention answered on the way -> [B, t, d]."""
        with self._ambient(index, x.device):
            y, choices = self.halves.through(x, self._routed(index), self.names, answer)
        self._count(choices)
        return y

    def before(self, index: int, x: Tensor, wanted: str = "qkv") -> Any:
        """Run a tile up to its mixer's call, see `Halves.before`."""
        with self._ambient(index, x.device):
            return self.halves.before(x, self._kwargs(index), self.names, wanted)

    def after(self, index: int, x: Tensor, out: Tensor) -> tuple[Tensor, Any, Choices | None]:
        """Run a tile with its attention output [B, t, H, Dv] known -> [B, t, d], the call if it was recorded, and what
        the layer's gates chose if they are listened to."""
        with self._ambient(index, x.device):
            y, request, choices = self.halves.after(x, self._routed(index), out)
        self._count(choices)
        return y, request, choices

    def after_keeping(self, index: int, x: Tensor, out: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Run a tile as `after` does -> [B, t, d], and the products its backward can use; none if it runs eagerly."""
        if not self._compiles(index):
            return self.after(index, x, out)[0], []
        with self._ambient(index, x.device):
            y, choices, products = self._compiled.after_keeping(x, self._routed(index), out)
        self._count(choices)
        return y, products

    def backward(self, index: int, gradients: Gradients, products: Sequence[Tensor] = ()) -> TileBackward:
        """Return the backward of a tile, of which forward may have kept products."""
        if self._compiles(index):
            return CompiledTile(self, index, gradients, products)
        return EagerTile(self, index, gradients)

    def differentiate_after(self, index: int, x: Tensor, out: Tensor, douts: Sequence[Tensor], **options: Any) -> Any:
        """See `CompiledHalves.differentiate_after`."""
        with self._ambient(index, x.device):
            return self._compiled.differentiate_after(x, self._routed(index), out, douts, **options)

    def differentiate_before(self, index: int, x: Tensor, grads: Sequence[Tensor], need_x: bool) -> Any:
        """See `CompiledHalves.differentiate_before`."""
        with self._ambient(index, x.device):
            return self._compiled.differentiate_before(x, self._kwargs(index), grads, need_x, self.names)

    @property
    def splits(self) -> bool:
        """Whether tiles run as two halves, so that other work fits between them."""
        return isinstance(self.halves, CompiledHalves)

    @property
    def _compiled(self) -> CompiledHalves:
        assert isinstance(self.halves, CompiledHalves)
        return self.halves

    def _compiles(self, index: int) -> bool:
        at = self.tiles[index]
        return self.halves.differentiates(at.stop - at.start)

    def _kwargs(self, index: int) -> dict[str, Any]:
        at = self.tiles[index]
        return self.arguments.tile(at.start, at.stop)

    def _routed(self, index: int) -> dict[str, Any]:
        """Return a tile's arguments, with what listens to the layer's gates."""
        kwargs = self._kwargs(index)
        return kwargs if self.routing is None else {**kwargs, ROUTING: self.routing.tokens.tile(self.tiles[index])}

    def _count(self, choices: Choices | None) -> None:
        if self.routing is not None:
            self.routing.add(choices)

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


class TileBackward(ABC):
    """The backward of one tile: what follows its attention, then what comes before it."""

    part: Tensor | None = None  # of the gradient of its hidden states, while it is held

    def __init__(self, run: LayerRun, index: int, gradients: Gradients) -> None:
        self.run, self.index, self.gradients = run, index, gradients
        self.at = run.tiles[index]

    @abstractmethod
    def after(self, out: Tensor, hold: bool) -> Tensor:
        """Differentiate what follows attention, whose output [B, t, H, Dv] is known; return its gradient.

        Args:
            hold: keep what `query` and `before` can use, if the tile was run in one go.
        """

    @abstractmethod
    def query(self) -> Request:
        """Return a request with the tile's q, after `after(hold=True)`."""

    @abstractmethod
    def before(self, douts: Sequence[Tensor], shared: Sequence[Tensor] = ()) -> None:
        """Differentiate what comes before the mixer.

        Args:
            douts: gradients of what it works on, [B, t, heads, ...] each: q, k and v, or a recurrence's tokens.
            shared: gradients of what all tiles hand to it alike, for one of them.
        """


class EagerTile(TileBackward):
    """Runs the layer's code and autograd."""

    leaf: Tensor | None = None
    request: Any = None  # Request or Recurrence

    def after(self, out: Tensor, hold: bool) -> Tensor:
        """Run the tile with gradients; its q, k and v come along and stay if held."""
        leaf, known = self.gradients.leaf(self.at), out.detach().requires_grad_()
        y, request, choices = self.run.after(self.index, leaf, known)
        outs, douts = [y, *(choices or ())[:1]], self.gradients.of(self.at)
        dx, dout = self.gradients.differentiate(leaf, outs, douts, known, again=hold)
        self.part = self.gradients.begin(self.at, dx)
        if hold:
            self.leaf, self.request = leaf, request
        return torch.zeros_like(known) if dout is None else dout

    def query(self) -> Request:
        """Return the request of `after`."""
        assert self.request is not None
        return self.request

    def before(self, douts: Sequence[Tensor], shared: Sequence[Tensor] = ()) -> None:
        """Differentiate the mixer's operands, running the tile up to them again unless they were held."""
        if self.leaf is None or self.request is None:
            self.leaf = self.gradients.leaf(self.at)
            self.request = self.run.before(self.index, self.leaf)
        grads = [*douts, *shared]
        outs = self.request.differentiable()[: len(grads)]  # tokens come first
        douts = [d.to(o.dtype) for d, o in zip(grads, outs, strict=True)]
        (dx,) = self.gradients.differentiate(self.leaf, outs, douts)
        self.gradients.end(self.at, self.part, dx)


class CompiledTile(TileBackward):
    """Runs compiled derivatives, which recompute only what they need, and no matrix products that were kept."""

    def __init__(self, run: LayerRun, index: int, gradients: Gradients, products: Sequence[Tensor]) -> None:
        super().__init__(run, index, gradients)
        self.products = products

    def after(self, out: Tensor, hold: bool) -> Tensor:
        """Differentiate the half after attention."""
        grads = self.gradients
        dx, dout, parameters = self.run.differentiate_after(
            self.index, self._x, out, grads.of(self.at), need_x=grads.need_x, products=self.products
        )
        grads.sums.add(parameters)
        self.part = grads.begin(self.at, dx)
        return torch.zeros_like(out) if dout is None else dout

    def query(self) -> Request:
        """Compute q alone."""
        return self.run.before(self.index, self._x, "q")

    def before(self, douts: Sequence[Tensor], shared: Sequence[Tensor] = ()) -> None:
        """Differentiate the half before the mixer."""
        grads = self.gradients
        dx, parameters = self.run.differentiate_before(self.index, self._x, [*douts, *shared], grads.need_x)
        grads.sums.add(parameters)
        grads.end(self.at, self.part, dx)

    @property
    def _x(self) -> Tensor:
        return self.gradients.x[:, self.at.start : self.at.stop]

"""The gradients of one pass of a layer, collected tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.layout import Piece
from longspan.tiling import GradientSum


class Gradients:
    """Gradients of one layer pass: of its hidden states, tile by tile, and of its parameters over all tiles.

    A tile's gradient of its hidden states has two parts, from after and before its mixer. Where they take the place of
    x, the first is held until the second is there, as x is read until then.

    Args:
        d_probabilities: gradient [E] of what the gates' probabilities add up to, the same for each tile.
        in_place: let dx take the place of x, which nobody else may hold.
    """

    def __init__(
        self,
        x: Tensor,
        dy: Tensor,
        parameters: tuple[Tensor, ...],
        need_x: bool,
        d_probabilities: Sequence[Tensor] = (),
        in_place: bool = False,
    ) -> None:
        self.x, self.dy, self.parameters, self.need_x = x, dy, parameters, need_x
        self.d_probabilities, self.in_place = d_probabilities, in_place
        self.sums = GradientSum(len(parameters))
        self.dx: Tensor | None = None
        if need_x:  # `data` leaves alone the version of x, whose tiles are in graphs of their own
            self.dx = x.data if in_place else torch.empty_like(x, memory_format=torch.contiguous_format)

    def leaf(self, at: Piece) -> Tensor:
        """Return a tile of the hidden states to differentiate."""
        return self.x[:, at.start : at.stop].detach().requires_grad_(self.need_x)

    def of(self, at: Piece) -> list[Tensor]:
        """Return the gradients of what a tile returns: of its hidden states, and of its sums of probabilities."""
        return [self.dy[:, at.start : at.stop], *self.d_probabilities]

    def differentiate(
        self, leaf: Tensor, outs: Sequence[Tensor], douts: Sequence[Tensor], *more: Tensor, again: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Differentiate a tile's outputs and add what belongs to the parameters; return the gradients of the rest.

        Args:
            leaf: the tile's hidden states; `more`: further leaves.
            again: keep the graph, as another part of it will be differentiated.
        """
        pairs = [(out, dout) for out, dout in zip(outs, douts, strict=True) if out.requires_grad]
        if not pairs:
            return (None,) * (1 + len(more))
        leaves = [*([leaf] if self.need_x else []), *more]
        grads = torch.autograd.grad(
            [out for out, _ in pairs],
            [*leaves, *self.parameters],
            [dout for _, dout in pairs],
            allow_unused=True,
            retain_graph=again,
        )
        self.sums.add(grads[len(leaves) :])
        return (*(() if self.need_x else (None,)), *grads[: len(leaves)])

    def begin(self, at: Piece, part: Tensor | None) -> Tensor | None:
        """Take the first part of a tile's dx; return it if it has to be held for `end`."""
        if self.in_place or self.dx is None:
            return part
        self._tile(at).copy_(part) if part is not None else self._tile(at).zero_()
        return None

    def end(self, at: Piece, held: Tensor | None, part: Tensor | None) -> None:
        """Take the second part; neither the tile's x nor its dy is read after that."""
        if self.dx is None:
            return
        tile = self._tile(at)
        if not self.in_place:
            if part is not None:
                tile += part
        elif held is not None and part is not None:
            torch.add(held, part, out=tile)
        else:
            one = part if held is None else held
            tile.zero_() if one is None else tile.copy_(one)

    def _tile(self, at: Piece) -> Tensor:
        assert self.dx is not None
        return self.dx[:, at.start : at.stop]

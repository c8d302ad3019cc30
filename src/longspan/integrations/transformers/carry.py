"""Let what the head makes leave it through its output, so that backward enters the head where engines wait for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.errors import ModelError


class Carry:
    """The way of results from the head to the end of the model's forward.

    The head's output is what its hooks see, and what the model goes on with, so a loss cannot take its place. The
    output is made to depend on the results instead, and the results, at the end of the forward, on what became of the
    output. Backward then goes from the loss to the output, past the hooks there, which gather the head's parameters
    under ZeRO-3, and on to the head; the results' gradients wait here meanwhile.
    """

    def __init__(self) -> None:
        self.results: tuple[Tensor, ...] = ()
        self.gradients: tuple[Tensor | None, ...] | None = None
        self.loaded = False

    def beside(self, output: Tensor, results: tuple[Tensor, ...]) -> Tensor:
        """Return the head's output as it is; the results take their own way."""
        self.results = results
        return output

    def load(self, output: Tensor, results: tuple[Tensor, ...]) -> Tensor:
        """Return the head's output, with results on board."""
        self.results = results
        self.loaded = any(t.requires_grad for t in results)
        if not self.loaded:
            return output
        return _Load.apply(self, output, *results)  # type: ignore[return-value]

    def unload(self, output: Tensor | None) -> tuple[Tensor, ...]:
        """Return the results, given what became of the head's output."""
        results, self.results = self.results, ()
        if not self.loaded:
            return results
        if output is None or not output.requires_grad:
            raise ModelError(
                "The model's logits do not come from the output head that longspan prepared, or are detached from it, "
                "so the loss has no way back."
            )
        return _Unload.apply(self, output, *(t.detach() for t in results))  # type: ignore[return-value]


class _Load(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carry: Carry, output: Tensor, *results: Tensor) -> Tensor:
        ctx.carry, ctx.count = carry, len(results)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.carry.gradients = ctx.carry.gradients, None
        return None, d_output, *(gradients or [None] * ctx.count)


class _Unload(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carry: Carry, output: Tensor, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.carry, ctx.like, ctx.shape = carry, output.new_empty(0), output.shape
        return tuple(t.view_as(t) for t in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.carry.gradients = gradients
        return None, ctx.like.new_zeros(ctx.shape), *[None] * len(gradients)

"""A layer's code before and after its attention call, by letting the call stop the layer or be answered."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from longspan.attention.call import Call
from longspan.errors import ModelError
from longspan.stream.calls import Answer, Capture, Compute, Inject, StopLayer
from longspan.stream.routing import Choices, Routing

ROUTING = "longspan_routing"
"""Name under which a tile's arguments hold the `Routing` that listens to the layer's gates."""


class Halves:
    """The unmodified forward of a decoder layer, seen as what comes before its attention and what comes after.

    Args:
        layer: the layer; `forward` its own forward, before it was replaced.
        hidden_name: name of its first parameter.
        context: name of the keyword argument that carries the attention call.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any], hidden_name: str, context: str) -> None:
        self.layer, self.hidden_name, self.context = layer, hidden_name, context
        bound = isinstance(forward, types.MethodType) and forward.__self__ is layer
        self.code: Callable[..., Any] = forward.__func__ if bound else _OnInstance(forward)

    def through(
        self, x: Tensor, kwargs: dict[str, Any], names: frozenset[str], answer: Answer
    ) -> tuple[Tensor, Choices | None]:
        """Run the layer on a tile in one go, with `answer` computing its attention; see `after` for what it returns."""
        return self.whole(x, kwargs, Compute(names, answer))

    def whole(self, x: Tensor, kwargs: dict[str, Any], call: Call) -> tuple[Tensor, Choices | None]:
        """Run the layer on a tile with `call` answering its attention."""
        given = {self.hidden_name: x, **kwargs, self.context: call}
        routing: Routing | None = given.pop(ROUTING, None)
        if routing is None:
            return _run(self.code, self.layer, given), None
        return routing.listen(lambda: _run(self.code, self.layer, given))

    def differentiates(self, tokens: int) -> bool:
        """Whether tiles of so many tokens have derivatives of their own."""
        return False

    def before(self, x: Tensor, kwargs: dict[str, Any], names: frozenset[str], wanted: str = "qkv") -> Any:
        """Run the layer on a tile up to its mixer's call -> `Request`, with those of q, k and v that are `wanted` at
        least, or `Recurrence`."""
        capture = Capture(names)
        try:
            self.whole(x, kwargs, capture)
        except StopLayer:
            pass
        if capture.request is None:
            raise ModelError(f"{type(self.layer).__name__} ended without calling its mixer.")
        return capture.request

    def after(self, x: Tensor, kwargs: dict[str, Any], out: Tensor) -> tuple[Tensor, Any, Choices | None]:
        """Run the layer on a tile whose attention output is known.

        Returns:
            [B, t, d]; the call with its q, k and v; and what the layer's gates chose, if the arguments hold a
            `Routing` to listen to them.
        """
        inject = Inject(out)
        y, choices = self.whole(x, kwargs, inject)
        if inject.request is None:
            raise ModelError(f"{type(self.layer).__name__} ended without calling its mixer.")
        return y, inject.request, choices


def _run(code: Callable[..., Any], layer: nn.Module, kwargs: dict[str, Any]) -> Tensor:
    out = code(layer, **kwargs)
    if isinstance(out, tuple):
        raise ModelError(f"{type(layer).__name__} returns {len(out)} values; only layers that return one run in tiles.")
    return out


@dataclass
class _OnInstance:
    """A forward that was set on the instance, in the shape of a class's function; a deep copy has its own."""

    forward: Callable[..., Any]

    def __call__(self, layer: nn.Module, **kwargs: Any) -> Any:
        return self.forward(**kwargs)

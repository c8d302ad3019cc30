"""The halves of a layer compiled: one graph each, whatever the number of layers and tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.attention.call import Request
from longspan.stream.calls import Answer, Capture, Inject, StopLayer
from longspan.stream.halves import Halves

Code = Callable[..., Any]


class Compiler:
    """Compiles the halves of layers, each kind of layer once.

    The exception that stops a layer is raised and caught inside the compiled function, so there is no graph break, and
    dead code elimination drops what a half does not need: the half after attention projects no queries or keys.

    Args:
        backend: a backend of torch.compile.
    """

    def __init__(self, backend: str) -> None:
        self.before = torch.compile(_before, backend=backend, fullgraph=True, dynamic=False)
        self.after = torch.compile(_after, backend=backend, fullgraph=True, dynamic=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        return self


class CompiledHalves(Halves):
    """Halves that run compiled; each half reads only its own part of the layer.

    Args:
        tokens: tiles of another size run eagerly, as each size is a compilation of its own.
    """

    def __init__(self, plain: Halves, compiler: Compiler, tokens: int) -> None:
        self.layer, self.code = plain.layer, plain.code
        self.hidden_name, self.context = plain.hidden_name, plain.context
        self.compiler, self.tokens = compiler, tokens

    def through(self, x: Tensor, kwargs: dict[str, Any], names: frozenset[str], answer: Answer) -> Tensor:
        """Run one half, the attention, and the other half."""
        return self.after(x, kwargs, answer(self.before(x, kwargs, names)))[0]

    def before(self, x: Tensor, kwargs: dict[str, Any], names: frozenset[str]) -> Request:
        """Run the compiled half before attention."""
        if x.shape[1] != self.tokens:
            return super().before(x, kwargs, names)
        q, k, v, scale = self.compiler.before(self.code, self.layer, self._kwargs(x, kwargs), self.context, names)
        return Request(self.layer, q, k, v, scale, {})

    def after(self, x: Tensor, kwargs: dict[str, Any], out: Tensor) -> tuple[Tensor, Request | None]:
        """Run the compiled half after attention; the call it answers is not returned."""
        if x.shape[1] != self.tokens:
            return super().after(x, kwargs, out)[0], None
        return self.compiler.after(self.code, self.layer, self._kwargs(x, kwargs), self.context, _plain(out)), None

    def _kwargs(self, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {self.hidden_name: _plain(x)} | {key: _plain(value) for key, value in kwargs.items()}


def _before(
    code: Code, layer: nn.Module, kwargs: dict[str, Any], context: str, names: frozenset[str]
) -> tuple[Tensor, Tensor, Tensor, float]:
    capture = Capture(names)
    try:
        code(layer, **kwargs, **{context: capture})
    except StopLayer:
        pass
    request: Any = capture.request
    return request.q, request.k, request.v, request.scale


def _after(code: Code, layer: nn.Module, kwargs: dict[str, Any], context: str, out: Tensor) -> Tensor:
    return code(layer, **kwargs, **{context: Inject(out)})


def _plain(value: Any) -> Any:
    """Give tensors (also in tuples) the strides of their shape: a cut of one row has those of the row, which differ
    from one length to the next and would each be compiled for."""
    if isinstance(value, Tensor):
        return value.reshape(-1).view(value.shape)
    return tuple(_plain(v) for v in value) if isinstance(value, tuple) else value

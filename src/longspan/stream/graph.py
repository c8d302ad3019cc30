"""The halves of a layer compiled for autograd's own graph: for layers that keep their activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.attention.call import Request
from longspan.kernels.protocol import Score
from longspan.stream.calls import Answer, Capture, Inject, StopLayer
from longspan.stream.halves import Halves

Code = Callable[..., Any]


class DifferentiableHalves:
    """A layer as two compiled functions around its attention; their activations stay for backward.

    The exception that stops the layer is raised and caught inside the compiled function, so there is no graph break;
    dead code elimination drops what a half does not need.

    Args:
        backend: a backend of torch.compile.
    """

    def __init__(self, backend: str) -> None:
        self.before = torch.compile(_before, backend=backend, fullgraph=True, dynamic=False)
        self.after = torch.compile(_after, backend=backend, fullgraph=True, dynamic=False)

    def through(
        self, halves: Halves, x: Tensor, kwargs: dict[str, Any], names: frozenset[str], answer: Answer
    ) -> Tensor:
        """Run a layer on x [B, s, d] with `answer` computing its attention -> [B, s, d]."""
        given = {halves.hidden_name: x, **kwargs}
        q, k, v, sinks, *asked = self.before(halves.code, halves.layer, given, halves.context, names)
        scale, softcap, window = asked
        out = answer(Request(halves.layer, q, k, v, Score(scale, softcap), window=window, sinks=sinks))
        return self.after(halves.code, halves.layer, given, halves.context, out)


def _before(
    code: Code, layer: nn.Module, kwargs: dict[str, Any], context: str, names: frozenset[str]
) -> tuple[Any, ...]:
    capture = Capture(names)
    try:
        code(layer, **kwargs, **{context: capture})
    except StopLayer:
        pass
    request: Any = capture.request
    score = request.score
    return request.q, request.k, request.v, request.sinks, score.scale, score.softcap, request.window


def _after(code: Code, layer: nn.Module, kwargs: dict[str, Any], context: str, out: Tensor) -> Tensor:
    return code(layer, **kwargs, **{context: Inject(out)})

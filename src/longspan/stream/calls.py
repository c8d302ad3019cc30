"""Answers to the mixer's call of a layer that runs on one tile of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from longspan.attention.call import Request
from longspan.recurrent.call import Recurrence


class StopLayer(Exception):
    """Ends a layer's forward at its mixer's call, once the operands are known."""


@dataclass
class Capture:
    """Keep the operands of the tile's mixer and stop the layer."""

    names: frozenset[str]
    request: Any = None  # Request or Recurrence, as the layer has it

    def mix(self, request: Request | Recurrence) -> Tensor:
        """Record the call and stop."""
        if isinstance(request, Request):
            request.refuse_unknown(self.names)
        self.request = request
        raise StopLayer


@dataclass
class Inject:
    """Let what the tile's mixer returns be `out` [B, t, H, Dv], known already; keep its operands."""

    out: Tensor
    request: Any = None  # Request or Recurrence, as the layer has it

    def mix(self, request: Request | Recurrence) -> Tensor:
        """Record the call and answer with the known output."""
        self.request = request
        return self.out


class Answer(Protocol):
    """Computes one tile's attention."""

    def __call__(self, request: Request) -> Tensor: ...


@dataclass
class Compute:
    """Let `answer` compute the tile's attention."""

    names: frozenset[str]
    answer: Answer

    def mix(self, request: Request | Recurrence) -> Tensor:
        """Hand the call to `answer`."""
        assert isinstance(request, Request)
        request.refuse_unknown(self.names)
        return self.answer(request)

"""Answers to the attention call of a layer that runs on one tile of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from longspan.attention.call import Request


class StopLayer(Exception):
    """Ends a layer's forward at its attention call, once q, k and v are known."""


@dataclass
class Capture:
    """Keep the tile's q, k and v and stop the layer."""

    names: frozenset[str]
    request: Request | None = None

    def attention(self, request: Request) -> Tensor:
        """Record the call and stop."""
        request.refuse_unknown(self.names)
        self.request = request
        raise StopLayer


@dataclass
class Inject:
    """Let the tile's attention be `out` [B, t, H, Dv], known already; keep its q, k and v."""

    out: Tensor
    request: Request | None = None

    def attention(self, request: Request) -> Tensor:
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

    def attention(self, request: Request) -> Tensor:
        """Hand the call to `answer`."""
        request.refuse_unknown(self.names)
        return self.answer(request)

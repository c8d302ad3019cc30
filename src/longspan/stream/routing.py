"""What the gates of expert layers choose, counted per expert, so that no logits of whole sequences are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.kernels.protocol import wide
from longspan.layout import Piece


class Choices(NamedTuple):
    """Per expert, over some tokens: the sum of its probabilities, differentiable, and how often it was chosen."""

    probabilities: Tensor  # [E], float32 or wider
    counts: Tensor  # [E], integers

    def plus(self, other: Choices) -> Choices:
        """Return those of both sets of tokens."""
        return Choices(self.probabilities + other.probabilities, self.counts + other.counts)


class Sink(Protocol):
    """Takes the logits of gates, in the order in which they run."""

    def append(self, logits: Tensor, /) -> None: ...


@dataclass
class Tap:
    """A forward hook on every gate of a model: hands its logits to whoever runs it, and to nobody otherwise.

    Args:
        index: which of a gate's outputs are the logits.
    """

    index: int
    sink: Sink | None = None

    def __call__(self, gate: nn.Module, args: Any, output: Any) -> None:
        if self.sink is not None:
            self.sink.append(output[self.index] if isinstance(output, tuple) else output)

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @contextmanager
    def into(self, sink: Sink) -> Iterator[None]:
        """Hand logits to `sink` for a while."""
        outer, self.sink = self.sink, sink
        try:
            yield
        finally:
            self.sink = outer

    def gates(self, module: nn.Module) -> int:
        """Count the gates inside a module."""
        return sum(any(hook is self for hook in m._forward_hooks.values()) for m in module.modules())


@dataclass(frozen=True)
class Router:
    """The gates of a model.

    Args:
        experts: outputs of a gate.
        top_k: experts that a token is sent to.
    """

    tap: Tap
    experts: int
    top_k: int

    def choices(self, logits: Tensor, real: Tensor | None) -> Choices:
        """Count what a gate's logits [n, E] choose; the experts of a token are those of its largest probabilities.

        Args:
            real: booleans [n], False for padding, which chooses nothing; None if there is none.
        """
        probabilities = logits.softmax(-1, dtype=wide(logits.dtype))
        chosen = probabilities.detach().topk(self.top_k, dim=-1).indices  # [n, k]
        ones = torch.ones_like(chosen)
        if real is not None:
            probabilities = probabilities * real[:, None]
            ones = ones * real[:, None]
        counts = torch.zeros(self.experts, dtype=chosen.dtype, device=chosen.device)
        return Choices(probabilities.sum(0), counts.scatter_add(0, chosen.flatten(), ones.flatten()))


class Routing(NamedTuple):
    """Some tokens of a layer whose gates are listened to.

    Args:
        gates: how many gates the layer has.
        real: booleans [B, t], False for padding; None if there is none.
    """

    router: Router
    gates: int
    real: Tensor | None

    def tile(self, at: Piece) -> Routing:
        """Return the same for a tile of the tokens."""
        return self._replace(real=None if self.real is None else self.real[:, at.start : at.stop])

    def listen(self, run: Callable[[], Tensor]) -> tuple[Tensor, Choices]:
        """Run the layer on these tokens -> what it returns, and what its gates chose.

        Raises:
            ModelError: other gates ran than those that are there.
        """
        logits: list[Tensor] = []
        with self.router.tap.into(logits):
            y = run()
        return y, self.of(logits)

    def of(self, logits: Sequence[Tensor]) -> Choices:
        """Count what the gates of the layer chose."""
        if len(logits) != self.gates:
            raise ModelError(
                f"{len(logits)} gates ran in a layer that has {self.gates}: the router's auxiliary loss would be "
                "wrong. Change experts before longspan.prepare."
            )
        real = None if self.real is None else self.real.flatten()
        first, *rest = (self.router.choices(each, real) for each in logits)
        for other in rest:
            first = first.plus(other)
        return first


@dataclass
class TileRouting:
    """The gates of a layer that runs in tiles: adds up what they choose, in its forward only.

    Args:
        tokens: all tokens of the layer.
    """

    tokens: Routing
    total: Choices | None = None
    counting: bool = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count each tile that runs meanwhile; a tile that runs again later counts once."""
        self.total, self.counting = None, True
        try:
            yield
        finally:
            self.counting = False

    def taken(self) -> Choices | None:
        """Return the sum and forget it: it becomes part of the graph, whose nodes hold this object."""
        total, self.total = self.total, None
        return total

    def add(self, choices: Choices | None) -> None:
        """Count what a tile chose."""
        if self.counting and choices is not None:
            self.total = choices if self.total is None else self.total.plus(choices)


@dataclass
class Balance:
    """What all gates of a model chose in one forward pass, on this rank's tokens.

    Args:
        real: booleans [B, s], False for padding; None if there is none.
    """

    router: Router
    real: Tensor | None
    choices: list[Choices] = field(default_factory=list)
    gates: int = 0

    def append(self, logits: Tensor) -> None:
        """Count what the gate of a layer that runs whole chose."""
        self.add(Routing(self.router, 1, self.real).of([logits]), 1)

    def add(self, choices: Choices, gates: int) -> None:
        """Count what the gates of a layer chose."""
        self.choices.append(choices)
        self.gates += gates

    def of(self, layer: nn.Module) -> Routing | None:
        """Return how to listen to a layer's gates, or None if it has none."""
        gates = self.router.tap.gates(layer)
        return Routing(self.router, gates, self.real) if gates else None

    def total(self, expected: int) -> Choices:
        """Return the sum over all gates.

        Args:
            expected: the number of gates.

        Raises:
            ModelError: a gate did not run, or ran twice.
        """
        if self.gates != expected or not self.choices:
            raise ModelError(
                f"{self.gates} gates ran in a model that has {expected}: the router's auxiliary loss would be wrong. "
                "Change experts before longspan.prepare."
            )
        first, *rest = self.choices
        for other in rest:
            first = first.plus(other)
        return first

"""Layers that keep nothing: rebuilt, in backward, from the nearest earlier layer that kept its hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from longspan.errors import TrainingError
from longspan.plan.keep import Keep

if TYPE_CHECKING:
    from longspan.stream.function import Mixing


@dataclass
class State:
    """What a layer's backward needs: its hidden states, and what its mixing kept, as `keep` says."""

    x: Tensor
    kept: tuple[Tensor, ...]
    keep: Keep


@dataclass
class Segment:
    """Consecutive layers of one forward pass, of which only the first kept its hidden states.

    When the last of them is differentiated, all are run again in order; this time each keeps its hidden states and its
    attention output, until its own backward has used them. Attention forward then runs twice in all, as with plain
    checkpointing, while between forward and backward a segment holds the hidden states of one layer.
    """

    first: State | None
    members: list[tuple[nn.Module, Mixing]] = field(default_factory=list)
    end: tuple[int, int] = (0, 0)
    states: dict[int, State] = field(default_factory=dict)

    def follows(self, x: Tensor) -> bool:
        """Whether these hidden states are what the last member returned, unchanged since."""
        return _identity(x) == self.end

    def add(self, layer: nn.Module, mixing: Mixing, y: Tensor) -> int:
        """Append a layer that returned y; return its position."""
        self.members.append((layer, mixing))
        self.end = _identity(y)
        return len(self.members) - 1

    def take(self, position: int) -> State:
        """Return a layer's state, once; the last layer's turn rebuilds those of all before it."""
        if position == len(self.members) - 1 and len(self.members) > 1:
            self._rebuild()
        state = self.states.pop(position, None)
        if position == 0:
            state, self.first = state or self.first, None
        if state is None:
            raise TrainingError("Layers that are rebuilt can be differentiated once per forward pass.")
        return state

    def _rebuild(self) -> None:
        """Run the layers again up to the last, which needs no output."""
        state, last = self.first, len(self.members) - 1
        if state is None:
            return
        x = state.x
        with torch.no_grad():
            for position, (layer, mixing) in enumerate(self.members):
                y = None if position == last else torch.empty_like(x, memory_format=torch.contiguous_format)
                # the last is being differentiated: its engine holds its parameters, and must go on holding them
                with nullcontext() if position == last else gathered(layer):
                    if position == 0 and state.keep in (Keep.X_O, Keep.X_O_KV):
                        assert y is not None
                        mixing.replay(x, state.kept, y)
                    else:
                        self.states[position] = State(x, mixing.forward(x, y, Keep.X_O), Keep.X_O)
                if y is not None:
                    x = y


def _identity(t: Tensor) -> tuple[int, int]:
    """Return where a tensor lies, and how often it was written to."""
    return t.data_ptr(), t._version


@contextmanager
def gathered(layer: nn.Module) -> Iterator[None]:
    """Hold a layer's whole parameters while it runs outside its own forward and backward.

    Cost: under FSDP2 one all-gather.
    """
    if not isinstance(layer, FSDPModule):
        yield
        return
    layer.unshard()
    try:
        yield
    finally:
        layer.reshard()

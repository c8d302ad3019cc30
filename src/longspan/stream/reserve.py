"""Host memory that a step will use, pinned before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longspan.errors import TrainingError
from longspan.keep import Budget, Keep
from longspan.plan.kept import Tier, divide
from longspan.stream.passage import Passage

Shares = Mapping[Tier, float]
"""Bytes in each tier."""


def reserve(passage: Passage, rows: int, tokens: int) -> None:
    """Pin the host memory that a pass over hidden states [rows, tokens, d] and its backward will use.

    Raises:
        ConfigError: budgets do not hold what layers keep, or CUDA does not pin it.
        TrainingError: no pass has run with these budgets.
    """
    stash = passage.stash
    if not stash.budget.host_bytes:
        return
    if stash.states is None:
        raise TrainingError(
            "How much host memory a step uses is not known before there was one: run a step with the same memory "
            "setting, however short, and reserve memory then."
        )
    width, dtype, passage.autocast = stash.states
    x = torch.empty(rows, tokens, width, dtype=dtype, device="meta")
    stash.reserve(math.ceil(Foresight(passage, x).most_on_host()))


@dataclass
class Foresight:
    """What layers keep at each moment of a step that has not begun, as passes and segments will decide it.

    Args:
        x: [B, s, d], like the layers' hidden states.
        keeps: what each layer keeps, now.
        again: layers that have been run again.
    """

    passage: Passage
    x: Tensor
    keeps: list[Keep] = field(init=False)
    held: list[Shares] = field(init=False)
    again: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        sizes = self.passage.sizes(self.x)
        self.keeps = [self.passage.memory.of(layer) for layer in range(len(sizes))]
        self.held = [shares for _, shares in divide(sizes, self.passage.stash.left())]

    def most_on_host(self) -> float:
        """Return the most bytes on the host at once: after forward, or in some layer's backward."""
        most = self._in(Tier.HOST)
        while self.held:
            self._rebuild()
            most = max(most, self._in(Tier.HOST), self._attended())
            self.held.pop()
        return most

    def _rebuild(self) -> None:
        """Run layers again whose hidden states the last one's backward needs, see `Segment`."""
        last, size = len(self.held) - 1, self.passage.bytes
        if not self.keeps[last].rebuilds:
            return
        start = next(i for i in range(last, -1, -1) if self.keeps[i].has_x)
        layers = [i for i in range(start, last) if not self.keeps[i].has_out]
        had = [size(i, Keep.X if self.keeps[i].has_x else Keep.NONE, self.x) for i in layers]
        for i in layers:
            self.keeps[i] = Keep.X_O if i in self.again else self.passage.memory.again(i, self.keeps[i])
        more = [size(i, self.keeps[i], self.x) - before for i, before in zip(layers, had, strict=True)]
        for i, (_, shares) in zip(layers, divide(more, self._left()), strict=True):
            self.held[i] = {tier: self.held[i][tier] + share for tier, share in shares.items()}
        self.again.update(layers)

    def _attended(self) -> float:
        """Return the bytes on the host once the last layer has its attention output again, if that is put away."""
        last, passage = len(self.held) - 1, self.passage
        keep = self.keeps[last]
        if keep.has_out or keep is Keep.GRAPH or passage.whole or passage.operands[last].recurrent:
            return 0.0
        left = self._left()  # filled up tile by tile
        away = passage.bytes(last, Keep.OUT, self.x) - (left.gpu_bytes or 0)
        return self._in(Tier.HOST) + min(left.host_bytes, max(0, away))

    def _in(self, tier: Tier) -> float:
        return sum(shares[tier] for shares in self.held)

    def _left(self) -> Budget:
        left = self.passage.stash.left()
        assert left.gpu_bytes is not None
        gpu, host = int(self._in(Tier.GPU)), int(self._in(Tier.HOST))
        return replace(left, gpu_bytes=left.gpu_bytes - gpu, host_bytes=left.host_bytes - host)

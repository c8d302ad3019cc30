"""Runs of consecutive layers that share what one of them kept, with their bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from longspan.keep import Keep
from longspan.plan.memory import graph_bytes, kept_bytes
from longspan.plan.setup import Setup
from longspan.plan.time import Clock

_MORE = (Keep.PRODUCTS, Keep.X_O_KV)
"""Decisions to keep more than hidden states and attention output."""


@dataclass(frozen=True)
class Run:
    """Layers `start` to `stop` (excluded).

    Args:
        first: what the first keeps.
        rest: what the others keep: their attention output, or nothing.
        rebuilt: what they keep once they are rebuilt, if they keep nothing.
    """

    start: int
    stop: int
    first: Keep
    rest: Keep = Keep.NONE
    rebuilt: Keep = Keep.X_O

    @property
    def keeps(self) -> tuple[Keep, ...]:
        """One decision per layer."""
        return (self.first, *[self.rest] * (self.stop - self.start - 1))


class Costs:
    """Bytes and seconds of runs of a setup's layers, by prefix sums."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.clock = setup, Clock(setup)
        layers, clock = setup.shape.layers, self.clock
        self.count = len(layers)
        kinds = {layer: i for i, layer in enumerate(layers)}  # equal layers are worked out once
        known = {layer: self._layer(layer, clock) for layer in kinds}
        self.x, self.out, self.graph = ([known[la][i] for la in layers] for i in range(3))
        self.more = {keep: [known[la][3][keep] for la in layers] for keep in _MORE}
        self.again = {keep: [known[la][4][keep] for la in layers] for keep in (*_MORE, Keep.X_O, Keep.X)}
        replays, rebuilds, self.attends, self.forward, self.plain, self.graph_s = (
            [known[la][i] for la in layers] for i in range(5, 11)
        )
        self.replays = replays
        self.sum_out, self.sum_x, self.sum_replay, self.sum_rebuild, self.sum_again = (
            [0, *accumulate(values)] for values in (self.out, self.x, replays, rebuilds, self.again[Keep.X_O])
        )
        self.sum_chain = [0, *accumulate(self.sum_replay)]

    def _layer(self, layer, clock: Clock) -> tuple:
        setup, compiled = self.setup, self.setup.compiled and self.setup.tiles == 1
        kept = {keep: kept_bytes(keep, setup, layer) for keep in Keep if keep not in (Keep.GRAPH, Keep.NONE)}
        x, out = kept[Keep.X], kept[Keep.OUT]
        more = {keep: kept[keep] - x - out for keep in _MORE}
        again = {keep: clock.again_s(layer, keep) for keep in (*_MORE, Keep.X_O, Keep.X)}
        graph = graph_bytes(setup, layer, setup.local, compiled)
        attend = clock.products_s(layer.query_key_value) + clock.attention_s(layer)[0] + clock.exchange_s(layer, 2, 1)
        forward = clock.forward_s(layer)
        plain, graph_s = forward + clock.derivative_s(layer), clock.graph_s(layer, compiled)
        times = (clock.replay_s(layer), clock.rebuild_s(layer), attend, forward, plain, graph_s)
        return (x, out, graph, more, again, *times)

    def longest(self, start: int) -> int:
        """Return where a run from a layer on must end: the next layer's input may be no layer's output."""
        return start + 1 if start < self.setup.shape.edited else self.count

    @cached_property
    def plain_s(self) -> list[float]:
        """Sums of forward and backward of the first layers, nothing computed again."""
        return [0, *accumulate(self.plain)]

    @cached_property
    def graphs_pay(self) -> bool:
        """Whether some layer is faster with its graph than with its products, which are less to keep."""
        again = self.again[Keep.PRODUCTS if self.setup.compiled else Keep.X_O_KV]
        return any(g < p + a for g, p, a in zip(self.graph_s, self.plain, again, strict=True))

    def least_s(self, start: int) -> float:
        """Return the least recomputation of the layers from `start` on, if all of them keep x and O."""
        return self.sum_again[-1] - self.sum_again[start]

    def held(self, run: Run) -> float:
        """Return the bytes of a run from forward to backward."""
        size = self.x[run.start]
        if run.first.has_out:
            size += self.out[run.start]
        if run.first in _MORE:
            size += self.more[run.first][run.start]
        if run.rest is Keep.OUT:
            size += self.sum_out[run.stop] - self.sum_out[run.start + 1]
        return size

    def states(self, run: Run, layer: int) -> float:
        """Return the bytes of a run while one of its layers runs backward."""
        size = self.x[run.start] + self.sum_out[layer + 1] - self.sum_out[run.start]
        if run.first in _MORE:
            size += self.more[run.first][run.start]
        if run.rest is Keep.NONE and run.rebuilt is Keep.X_O:
            size += self.sum_x[layer + 1] - self.sum_x[run.start + 1]
        return size

    def extra_s(self, run: Run) -> float:
        """Return the seconds of what a run computes again."""
        a, b = run.start, run.stop
        if b - a == 1:
            return self.again[run.first][a]
        seconds = self.sum_again[b] - self.sum_again[a]
        if run.rest is Keep.OUT or run.rebuilt is Keep.OUT:  # each x is made from the first one's
            seconds += self.sum_chain[b] - self.sum_chain[a] - (b - a) * self.sum_replay[a]
        if run.rest is Keep.NONE:
            seconds += self.replays[a] if run.first.has_out else self.sum_rebuild[a + 1] - self.sum_rebuild[a]
            seconds += self.sum_rebuild[b - 1] - self.sum_rebuild[a + 1] + self.attends[b - 1]
        return seconds

    def copies_s(self, runs: Sequence[Run], gpu_bytes: float | None) -> float:
        """Return by how much the copies of what does not stay on the device outlast the layers that hide them.

        The last layers' stays, as it is needed first.
        """
        if gpu_bytes is None:
            return 0.0
        rate, seconds = self.setup.cluster.machine.host_gbs * 1e9, 0.0
        for run in reversed(runs):
            size = self.held(run)
            moved_s, gpu_bytes = max(0.0, size - gpu_bytes) / rate, max(0.0, gpu_bytes - size)
            layers = slice(run.start, run.stop)
            forward_s = sum(self.forward[layers])
            backward_s = sum(self.plain[layers]) - forward_s + self.extra_s(run)
            seconds += max(0.0, moved_s - forward_s) + max(0.0, moved_s - backward_s)
        return seconds

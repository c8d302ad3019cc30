"""What is on the device at each moment of a step, once it is decided what layers keep: the expected peak.

Decisions are made with room for the worst at every moment (`solve.py`). What is then expected is less: of what layers
keep, the last layers' stays on the device, and is gone by the time that the first ones' backward runs; what travels is
one layer's at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from longspan.keep import Keep
from longspan.plan.memory import TRAVELLING, Ledger, Moment
from longspan.plan.runs import Costs, Run

_FORWARD = ("forward", "loss", "norm")


@dataclass(frozen=True)
class Stay:
    """Where kept tensors of a choice are.

    Args:
        gpu_bytes: of the device, for kept tensors; None for as many as there are.
        graphs: layers at the end that keep their graph.
    """

    costs: Costs
    ledger: Ledger
    gpu_bytes: float | None
    runs: Sequence[Run]
    graphs: int

    @property
    def limit(self) -> float:
        """Bytes of kept tensors that the device may hold."""
        return math.inf if self.gpu_bytes is None else self.gpu_bytes

    @cached_property
    def below(self) -> list[float]:
        """What the runs below each run keep after forward; at last all of them."""
        return [0.0, *accumulate(self.costs.held(run) for run in self.runs)]

    @cached_property
    def run_of(self) -> dict[int, int]:
        """The run of each layer that does not keep its graph."""
        return {i: n for n, run in enumerate(self.runs) for i in range(run.start, run.stop)}

    @cached_property
    def most(self) -> float:
        """The most that layers ever keep, on the device and the host."""
        return max([self.below[-1], *(self._kept(layer, n) for layer, n in self.run_of.items())])

    def fullest(self) -> dict[str, float]:
        """Return the bytes of the device at the fullest moment, by cause."""
        moments = [m for m in self.ledger.moments if m.layer is None or m.layer in self.run_of]
        if self.graphs:
            moments.append(self.ledger.graph_backward(self.costs.count - 1))
        return max((self._at(moment) for moment in moments), key=lambda causes: sum(causes.values()))

    def _at(self, moment: Moment) -> dict[str, float]:
        causes = dict(moment.causes)
        kept, travels = self._places(moment)
        if TRAVELLING in causes:
            causes[TRAVELLING] += min(travels, self.ledger.moving_bytes) - self.ledger.moving_bytes
        streamed = self.costs.count - self.graphs
        if moment.name in _FORWARD or (moment.layer or 0) >= streamed:
            kept += sum(self.costs.graph[streamed:])
        causes["kept by layers"] = kept
        if self.graphs and moment.name == "forward":  # nearly all that the last layer computes with is its graph
            causes["tile"] = causes.pop("hidden states")
            causes.pop("keys and values")
        return causes

    def _places(self, moment: Moment) -> tuple[float, float]:
        """Return what of kept tensors is on the device at a moment, and what of them is on its way."""
        whole = self.below[-1]
        if moment.layer is None:
            if moment.name not in _FORWARD:
                return 0.0, 0.0
            last = self.costs.held(self.runs[-1]) if self.runs else 0.0
            away = last > self.limit and moment.name == "forward"  # else what leaves did so before the last layers ran
            return min(whole, self.limit), last if away else 0.0
        if moment.layer not in self.run_of:
            return min(whole, self.limit), 0.0
        n = self.run_of[moment.layer]
        alive = self.below[n + 1]
        stands = min(alive, max(0.0, self.limit - (whole - alive)))  # the last layers' was put here first
        made = self._kept(moment.layer, n) - self.below[n + 1]  # again, as its run is rebuilt; less what it let go
        here = min(stands + max(0.0, made), self.limit) + min(0.0, made)
        held, next_held = self.costs.held(self.runs[n]), self.costs.held(self.runs[n - 1]) if n else 0.0
        travels = next_held if stands < held + next_held else 0.0
        if stands + made > self.limit:
            travels = max(travels, self._rebuilt(self.runs[n]))
        counted = 0.0 if self.ledger.in_place(moment.layer) else self.costs.x[moment.layer]  # among its hidden states
        return max(0.0, here - counted), travels

    def _kept(self, layer: int, n: int) -> float:
        return self.below[n] + self.costs.states(self.runs[n], layer)

    def _rebuilt(self, run: Run) -> float:
        """Return what one layer of a run keeps once it is rebuilt."""
        if run.rest is not Keep.NONE:
            return self.costs.held(run)
        return self.costs.out[run.start] + (self.costs.x[run.start] if run.rebuilt is Keep.X_O else 0)

"""Seconds per optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longspan.bench.clock import Deadline, forget_peaks, median, peaks, timed
from longspan.bench.measure import Case
from longspan.bench.results import DONE, STOPPED, Results
from longspan.bench.timeline import timeline
from longspan.bench.workload import Workload
from longspan.once import tell

_SLACK = 1.1


@dataclass(frozen=True)
class Steps:
    """Times a few steps, after one on a short row that compiles and allocates; then the host memory of the long ones is
    pinned, which a training run pays for once.

    Args:
        steps: how many.
        profile: run one more under the profiler.
    """

    steps: int
    profile: bool = False

    def __call__(self, load: Workload, case: Case, row: dict[str, Any], results: Results, deadline: Deadline) -> None:
        """Fill a row: `step_s` is the median, `losses` are those of each step, `peak_gib` the largest.

        `pinned_s` are the seconds that host memory took.
        """
        device, tokens = load.device, case.setting.tokens
        needed_s = _SLACK * case.row.get("predicted_s", 0.0)
        if not deadline.allows(needed_s, device):
            row["state"] = STOPPED
            return
        seconds, length = timed(lambda: load.warm_up(tokens), device)
        pinned_s, _ = timed(lambda: load.reserve(tokens), device)
        row |= {"warm_up_tokens": length, "warm_up_s": round(seconds, 2), "pinned_s": round(pinned_s, 2)}
        row |= {"steps": [], "losses": []}
        for number in range(self.steps):
            if not deadline.allows(needed_s, device):
                row["state"] = STOPPED if not row["steps"] else DONE
                return
            ids = load.row(tokens, number)
            forget_peaks(device)
            seconds, loss = timed(lambda ids=ids: load.step(ids), device)
            most = peaks(device)
            row["steps"].append(round(seconds, 4))
            row["losses"].append(round(loss, 5))
            row |= {name: max(value, row.get(name, 0.0)) for name, value in most.items()}
            row["step_s"] = median(row["steps"])
            row["tokens_per_s"] = round(tokens / row["step_s"], 1)
            needed_s = _SLACK * seconds
            results.save()
        row["state"] = DONE
        if self.profile and deadline.allows(2 * needed_s, device):
            ids = load.row(tokens, self.steps)
            row["timeline"] = timeline(lambda: load.step(ids)).splitlines()
            tell("\n".join([f"TIMELINE {case.setting.memory} {tokens}", *row["timeline"]]))

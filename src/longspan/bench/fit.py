"""Whether a row fits: a whole step in which attention runs in a few calls only."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from longspan.bench.clock import Deadline, forget_peaks, peaks, timed
from longspan.bench.measure import Case
from longspan.bench.results import DONE, STOPPED, Results
from longspan.bench.tracked import TrackedBytes
from longspan.bench.workload import Workload

SEARCH_STEP_TOKENS = 16_384


def fit(load: Workload, case: Case, row: dict[str, Any], results: Results, deadline: Deadline) -> None:
    """Fill a row with the peaks of a step of its length; that it ends is the proof.

    A short step first makes the optimizer's state, as that lies beside everything else in every later step. On a CPU
    the bytes of all tensors are added up, which takes longer than the step.
    """
    device, tokens = load.device, case.setting.tokens
    if not deadline.allows(0.0, device):
        row["state"] = STOPPED
        return
    load.warm_up(tokens)
    pinned_s, _ = timed(lambda: load.reserve(tokens), device)
    row["pinned_s"] = round(pinned_s, 2)
    results.save()
    ids = load.row(tokens, 0)
    forget_peaks(device)
    tracked = None if device.type == "cuda" else TrackedBytes()
    with load.handle.fit(), tracked or nullcontext():
        seconds, _ = timed(lambda: load.step(ids, lr=0.0), device)
    row |= {"seconds": round(seconds, 2), **peaks(device, tracked.peak if tracked else 0), "state": DONE}


def search(fits: Callable[[int], bool | None], start: int, step_tokens: int = SEARCH_STEP_TOKENS) -> int | None:
    """Return the longest length that fits: doubled until it does not, then bisected to a sixteenth, or to a step.

    Args:
        fits: tries a length; None when there is no time left to tell.
        start: where to begin.
    """
    low, high = 0, math.inf
    length = start
    while True:
        answer = fits(length)
        if answer is None:
            break
        low, high = (max(low, length), high) if answer else (low, min(high, length))
        if high is math.inf:
            length = 2 * length
            continue
        if high - low <= max(step_tokens, low / 16):
            break
        middle = (low + int(high)) // 2
        length = max(1, middle // step_tokens) * step_tokens if middle >= step_tokens else middle
        if length in (low, high):
            break
    return low or None

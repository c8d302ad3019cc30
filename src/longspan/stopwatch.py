"""Seconds of spans of work by name, as the device that does it sees them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Add up seconds of named spans while `running`; until then a span costs a look at that flag.

    On a GPU a span lies between two events of the current stream. The host waits for neither: `take` is called after a
    sync that its caller has anyway. Spans of one name may follow each other, and lie inside those of another.

    Args:
        device_type: `cuda` for a GPU's time, anything else for the host's.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.running = False
        self._on_gpu = device_type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._spare: list[Any] = []  # events cost more to make than to record again

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what is done inside; where it raises, nothing is counted."""
        if not self.running:
            yield
            return
        start = self._mark()
        yield
        self._spans.append((name, start, self._mark()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each name since the last call. On a GPU its work up to now has ended."""
        spans, self._spans = self._spans, []
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in spans:
            seconds[name] += start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
            if self._on_gpu:
                self._spare += (start, end)
        return dict(seconds)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

"""Spans of time by name: the host's, and a GPU's between events that nobody waits for."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan.comm.pending import Pending
from longspan.stopwatch import Stopwatch


def test_spans_add_up_by_name_and_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 10.0, 12.0, 13.0, 16.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch()
    watch.running = True
    with watch.span("a"):
        pass
    with watch.span("b"), watch.span("a"):  # 10 to 16, and 12 to 13 inside it
        pass
    assert watch.take() == {"a": 2.0, "b": 6.0}
    assert watch.take() == {}


def test_what_raises_is_not_counted_and_what_does_not_run_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch()
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", None)  # not even looked at
        with watch.span("a"):
            pass
    watch.running = True
    with pytest.raises(ZeroDivisionError), watch.span("a"):
        raise ZeroDivisionError
    assert watch.take() == {}


def test_a_gpu_is_timed_by_events_that_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = itertools.count(), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, end: Any) -> float:
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch("cuda")
    watch.running = True
    for _ in range(2):
        with watch.span("a"), watch.span("b"):
            pass
        assert watch.take() == {"a": 3.0, "b": 1.0}
    assert len(made) == 4


def test_only_waiting_is_counted_not_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    watch = Stopwatch()
    watch.running = True
    requests = [SimpleNamespace(wait=lambda: advance(2.0)), SimpleNamespace(wait=lambda: advance(3.0))]
    pending = Pending(requests, lambda: advance(100.0), None, watch).then(lambda _: advance(1000.0))
    assert watch.take() == {}
    pending.wait()
    assert watch.take() == {"exchange": 5.0}
    Pending([], lambda: None, None, watch).wait()
    assert watch.take() == {}

"""Phases and waits on a GPU: what its stream did, without a sync of their own."""

from __future__ import annotations

import gc
import time
from contextlib import closing

import pytest
import torch

from longspan.config import parse_config
from longspan.integrations.models import build_model
from longspan.mesh import Mesh
from longspan.stopwatch import Stopwatch
from longspan.train.meter import Meter
from longspan.train.packing import Step
from longspan.train.trainee import assemble

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
CYCLES = 200_000_000  # about a tenth of a second


def test_spans_hold_what_the_gpu_did_and_the_host_goes_on() -> None:
    watch = Stopwatch("cuda")
    watch.running = True
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(2):
        with watch.span("long"):
            torch.cuda._sleep(CYCLES)
        with watch.span("short"):
            torch.cuda._sleep(CYCLES // 4)
    assert time.perf_counter() - start_s < 0.05
    torch.cuda.synchronize()
    whole_s, seconds = time.perf_counter() - start_s, watch.take()
    assert seconds["long"] == pytest.approx(4 * seconds["short"], rel=0.05)
    assert sum(seconds.values()) == pytest.approx(whole_s, rel=0.05)


@pytest.fixture
def used() -> None:
    """Have a process that held more memory than what is measured, of which nothing is left."""
    gc.collect()
    torch.empty(2**32, dtype=torch.uint8, device=DEVICE)


@pytest.mark.usefixtures("used")
def test_memory_of_a_step_is_its_own() -> None:
    torch.cuda.reset_peak_memory_stats(DEVICE)  # as where a run begins
    meter, rows = Meter(DEVICE, Mesh(device_type="cuda"), None), []
    for number, step in enumerate(meter.steps(Step([], 1, 10, [10]) for _ in range(2)), 1):
        with meter.phase("forward"):
            torch.empty((2 - number) * 2**28 + 2**20, dtype=torch.uint8, device=DEVICE).fill_(1)
        rows.append(meter.row(number, step, loss=1.0, grad_norm=1.0, lr=1.0)[0])
    first, second = rows
    assert first.gpu_bytes - second.gpu_bytes == 2**28
    assert second.peak_gpu_bytes == first.peak_gpu_bytes == first.gpu_bytes
    assert 0 < first.forward_s <= first.step_s and first.other_s >= 0


@pytest.mark.usefixtures("used")
def test_memory_of_a_run_is_its_own() -> None:
    """A run's peak has its model in it, and nothing that the process held before."""
    config = parse_config(
        {
            "model": {"name": "tiny-llama", "init": "random"},
            "data": {"files": "a"},
            "sequence_length": 64,
            "max_steps": 1,
            "output_dir": "x",
            "kernel": "reference",
            "memory": {"keep": "graph"},
        }
    )
    with closing(assemble(config, lambda blank: build_model(config.model, 0), DEVICE)) as trainee:
        step = next(trainee.meter.steps([Step([], 1, 10, [10])]))
        row, _ = trainee.meter.row(1, step, loss=1.0, grad_norm=1.0, lr=1.0)
        weights = sum(p.nbytes for p in trainee.model.parameters())
        assert weights <= row.gpu_bytes <= row.peak_gpu_bytes < 2**32

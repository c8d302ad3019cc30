"""Measuring a machine for plans."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from longspan.bench.calibrate import Rates, measured
from longspan.cli.calibrate import calibrate
from longspan.errors import TopologyError
from longspan.plan import library
from longspan.plan.library import find_machine
from test_plan_public import run


def test_two_processes_are_measured_and_plans_take_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "OWN_FILE", tmp_path / "machines.yaml")
    before = json.loads(run("--model", "tiny-llama", "--gpus", "2xcpu", "--seq-len", "4K", "--json")[1])
    told = io.StringIO()
    calibrate("2xcpu", told)
    assert "cpu is described in" in told.getvalue()
    found = find_machine("cpu")
    assert found.source.startswith("measured 20") and [rate.name for rate in found.kernels] == ["cpu"]
    assert found.link_gbs != 2 and found.network_gbs == 1  # two hosts were not there to be measured
    after = json.loads(run("--model", "tiny-llama", "--gpus", "2xcpu", "--seq-len", "4K", "--json")[1])
    (rate,), share = found.kernels, 4 / 14  # of attention's flops, in forward; nothing is attended twice
    slower = 0.03 * (share / rate.forward_tflops + (1 - share) / rate.backward_tflops)
    assert after["seconds"]["attention"] == pytest.approx(before["seconds"]["attention"] * slower)


def test_rates_are_of_the_right_order() -> None:
    """A core of any machine that runs this makes a gigaflop and moves a gigabyte in a second."""
    machine = measured("cpu", torch.device("cpu"))
    assert 1e-3 < machine.gemm_tflops < 10
    assert 0.3 < machine.memory_gbs < 2000
    assert 0.3 < machine.host_gbs < 2000
    assert machine.link_gbs == find_machine("cpu").link_gbs  # one process exchanges nothing
    assert all(1e-4 < r.forward_tflops < 10 and 1e-4 < r.backward_tflops < 10 for r in machine.kernels)
    assert machine.peak_tflops >= machine.gemm_tflops


def test_a_product_counts_its_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Rates(torch.device("cpu"))
    monkeypatch.setattr(meter, "seconds", lambda work, times=0: 0.5)
    assert meter.gemm_tflops() == 2 * 1024**3 / 0.5 / 1e12
    assert meter.memory_gbs() == 3 * 4 * (1 << 22) / 0.5 / 1e9
    (rate,) = meter.kernels()
    assert rate.forward_tflops == pytest.approx(4 * 4 * 128 * 512 * 512 / 2 / 0.5 / 1e12)


def test_gpus_that_are_not_there() -> None:
    with pytest.raises(TopologyError, match="this host has no GPU" if not torch.cuda.is_available() else ""):
        calibrate("99xH200", io.StringIO())


@pytest.mark.slow
def test_a_plan_is_held_against_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "OWN_FILE", tmp_path / "machines.yaml")
    flags = ("--gpus", "cpu", "--host-memory", "8GiB", "--seq-len", "512", "--engine", "single", "--calibrate")
    code, out, _ = run("--model", "tiny-llama", *flags, "--json")
    assert code == 0
    made = json.loads(out)
    assert made["measured"]["peak_gib"] > 0 and made["measured"]["seconds"] > 0
    assert made["measured"]["peak_gib"] == pytest.approx(made["measured"]["predicted_gib"], rel=0.5)  # of a tiny model

"""The machines that plans know, and files of a user's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import longspan
from longspan.errors import ConfigError
from longspan.plan import library
from longspan.plan.library import find_machine, machine_of, machines, parse_gpus, read_machines, write_machine
from longspan.plan.machine import GIB, KernelRate

OWN = """
h200:
  names: [H200]
  memory_gib: 140
  peak_tflops: 989
  gemm_tflops: 378
  memory_gbs: 4000
  host_gbs: 55
  link_gbs: 300
  network_gbs: 45
  kernels: {fa4: [648, 610]}
  source: mine
"""


def test_drivers_names() -> None:
    named = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100-80g",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA H20": "h20",
        "NVIDIA A100-SXM4-80GB": "a100-80g",
        "NVIDIA A100-SXM4-40GB": "a100-40g",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA L40S": "l40s",
    }
    found = {name: machine_of(name) for name in named}
    assert {name: machine and machine.name for name, machine in found.items()} == named
    assert machine_of("Somebody's GPU") is None


def test_figures_are_sensible() -> None:
    for machine in machines().values():
        assert machine.source
        assert machine.gemm_tflops < machine.peak_tflops
        assert all(max(r.forward_tflops, r.backward_tflops) < machine.peak_tflops for r in machine.kernels)
        assert machine.on_gpu == (machine.name != "cpu")
    assert find_machine("h200").rate("aten-flash") == KernelRate("aten-flash", 326, 326, expands=True)
    assert find_machine("h200").memory_bytes == 139 * GIB


def test_a_file_of_ones_own_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = longspan.plan("llama-1b", 32768, 1, host_memory_gib=64).seconds
    monkeypatch.setattr(library, "OWN_FILE", tmp_path / "machines.yaml")
    (tmp_path / "machines.yaml").write_text(OWN)
    after = longspan.plan("llama-1b", 32768, 1, host_memory_gib=64).seconds
    assert sum(after.values()) > 1.2 * sum(before.values())  # products at half the rate
    assert parse_gpus("4xH200")[1].source == "mine"
    assert find_machine("b200").gemm_tflops == 1600  # the others are still there


def test_machines_are_put_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "longspan" / "machines.yaml"
    monkeypatch.setattr(library, "OWN_FILE", file)
    assert find_machine("h200").source != "mine"
    write_machine(replace(find_machine("h200"), source="mine", host_gbs=20.0), file)
    write_machine(replace(find_machine("b200"), name="box", source="mine"), file)
    assert find_machine("h200").host_gbs == 20 and find_machine("box").gemm_tflops == 1600
    assert list(machines())[:2] == ["h200", "box"]
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"Cannot read .*machines.yaml, the file of your machines"):
        machines()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("h200: [", "is not YAML"),
        ("h200: 3", "h200: "),
        ("H 200: {}", "H 200.[key]: "),
        (OWN.replace("gemm_tflops: 378", "gemm_tflops: true"), "h200.gemm_tflops: .*true and false are not numbers"),
        (OWN.replace("gemm_tflops: 378", "gemm_tflops: 0"), "h200.gemm_tflops: .*greater than 0"),
        (OWN.replace("gemm_tflops: 378", "gemm_tflops: .nan"), "h200.gemm_tflops: .*finite"),
        (OWN.replace("gemm_tflops: 378", "flops: 378"), "h200.gemm_tflops: field required; h200.flops: extra"),
        (OWN.replace("{fa4: [648, 610]}", "{}"), "h200.kernels: .*at least 1"),
        (OWN.replace("[648, 610]", "[648]"), "h200.kernels.fa4.1: field required"),
    ],
)
def test_files_that_cannot_be_used(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace("[", r"\[")):
        read_machines(text, "mine.yaml")


def test_all_that_is_written_is_read_again() -> None:
    for machine in machines().values():
        text = yaml.safe_dump({machine.name: library.Entry.of(machine).model_dump(mode="json")}, sort_keys=False)
        assert read_machines(text, "mine.yaml")[machine.name] == machine


def test_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match=r"no figures for a machine 'mi300'; known are h200, .*plan --calibrate"):
        parse_gpus("8xmi300")
    for text in ("", "0xH200", "2x", "9" * 30 + "xH200", "2 H200"):
        with pytest.raises(ConfigError, match="such as 2xH200"):
            parse_gpus(text)

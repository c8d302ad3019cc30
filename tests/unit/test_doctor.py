"""What `longspan doctor` tells of a host: versions, links between its GPUs, and how memory is allocated."""

from __future__ import annotations

import importlib.metadata
import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import longspan
from longspan.cli import main
from longspan.cli.links import parse_numbers, parse_topology
from longspan.errors import ConfigError
from longspan.integrations import deepspeed as alst

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNODE\tSYS\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tNODE\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)
NUMBERS = "0, GPU-aaa\n1, GPU-bbb\n2, GPU-ccc\n"


def doctor(*arguments: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as left:
        main(["doctor", *arguments])
    assert not left.value.code
    return out.getvalue()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show a process the host's third and first GPU, which reach each other's memory one way alone."""

    class Properties(SimpleNamespace):
        name, total_memory = "H200", 1 << 37

    def ask(command: list[str], **options: Any) -> Any:
        assert command[0] == "nvidia-smi"
        return SimpleNamespace(stdout=TOPOLOGY if command[1] == "topo" else NUMBERS)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: Properties(uuid=["ccc", "aaa"][gpu]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    monkeypatch.setattr(subprocess, "run", ask)
    monkeypatch.setattr("longspan.kernels.select.available", lambda device: {"reference": None})


def test_the_matrix_of_links() -> None:
    found = parse_topology(TOPOLOGY)
    assert found == {(0, 1): "NV18", (1, 0): "NV18", (0, 2): "SYS", (2, 0): "SYS", (1, 2): "NODE", (2, 1): "NODE"}
    assert parse_topology("") == {} == parse_topology("No devices were found")
    assert parse_numbers(NUMBERS) == {"aaa": 0, "bbb": 1, "ccc": 2}


@pytest.mark.usefixtures("two_gpus")
def test_links_between_the_gpus_that_are_seen() -> None:
    assert json.loads(doctor("--json"))["links"] == [{"gpus": [0, 1], "peer_access": False, "kind": "SYS"}]
    assert "GPU 0 - GPU 1: SYS, no peer access" in doctor()


@pytest.mark.usefixtures("two_gpus")
def test_links_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(command: list[str], **options: Any) -> Any:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    assert json.loads(doctor("--json"))["links"] == [{"gpus": [0, 1], "peer_access": True, "kind": None}]


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("flash-attn-4", "longspan"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "4.57.1" if name == "transformers" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    facts = json.loads(doctor("--json"))
    named = "flash-linear-attention bitsandbytes liger-kernel flash-attn-4 torchao deepspeed peft trl accelerate"
    assert {"python", "torch", *named.split()} <= facts["versions"].keys()
    assert facts["versions"]["flash-attn-4"] is None
    assert facts["versions"]["longspan"] == longspan.__version__
    assert facts["unsupported"] == ["transformers >= 5.17, < 6, found 4.57.1"]
    assert facts["links"] == []
    assert "longspan needs transformers >= 5.17, < 6, found 4.57.1" in doctor()


@pytest.mark.parametrize(("setting", "told"), [(None, "by torch"), ("torch", "=torch"), ("native", "unset it, or set")])
def test_how_deepspeed_locks_memory(monkeypatch: pytest.MonkeyPatch, setting: str | None, told: str) -> None:
    monkeypatch.delenv("DS_PIN_MEMORY_BACKEND", raising=False)
    if setting is not None:
        monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", setting)
    wanted = None if setting is None else f"DS_PIN_MEMORY_BACKEND={setting}"
    assert json.loads(doctor("--json"))["pinned_memory"] == wanted
    (line,) = (line for line in doctor().splitlines() if line.startswith("pinned memory"))
    assert told in line


def test_alst_takes_host_memory_from_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And refuses what DeepSpeed locks without the device's knowledge, before anything is copied."""
    asked: list[int] = []

    def pin_memory(tensor: torch.Tensor, make_copy: bool = True) -> torch.Tensor:
        assert not make_copy
        asked.append(tensor.nbytes)
        return tensor  # locked, perhaps, but not registered

    accelerator = SimpleNamespace(pin_memory=pin_memory)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", SimpleNamespace(get_accelerator=lambda: accelerator))
    pool = alst.get_checkpoint_hidden_states_offloading_ctx_manager().pool
    with pytest.raises(ConfigError, match="DS_PIN_MEMORY_BACKEND"):
        pool.take(100, torch.device("cuda"))
    assert asked == [128]
    assert pool.take(100, torch.device("cpu")).nbytes == 128 and asked == [128]
    monkeypatch.delitem(sys.modules, "deepspeed")
    pool = alst.get_checkpoint_hidden_states_offloading_ctx_manager(use_pin_memory=False).pool
    assert pool.take(100, torch.device("cuda")).nbytes == 128 and asked == [128]

"""A step without memory ends with what it was expected to need, and what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from longspan.errors import TrainingError
from pool import RunRanks
from runs import config_of, run

ALONE: dict[str, Any] = {"engine": "single", "sequence_parallel_size": 1, "gradient_accumulation_steps": 1}


def fails_with(config: Any, error: BaseException, steps: int = 2) -> str:
    """Train until a layer raises; return what the run says."""
    plain, calls = nn.functional.silu, 0

    def silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        nonlocal calls
        calls += x.requires_grad
        if calls > steps:
            raise error
        return plain(x, inplace)

    with patch.object(nn.functional, "silu", silu):
        try:
            run(config)
        except TrainingError as raised:
            assert raised.__cause__ is error
            return str(raised)
    return ""


SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_shortage_names_causes_and_ways_out(tmp_path: Path, error: Exception) -> None:
    said = fails_with(config_of(str(tmp_path), **ALONE), error)
    assert re.match(r"In step \d, forward: out of memory. The plan expected", said)
    for cause in ("parameters", "optimizer"):
        assert re.search(rf"{cause}[a-z ]* [\d.]+ MiB", said), said
    assert "Cheapest change: " in said and "optimizer.kind: adamw-host" in said
    assert "Or fewer tokens: sequence_length: 48." in said
    assert said.splitlines()[-1].startswith("  torch says: ") and len(said.splitlines()) == 2


def test_what_already_spares_memory_is_not_named(tmp_path: Path) -> None:
    changes = {"memory": {"keep": "x+O+KV", "tile_tokens": 16}, "optimizer": {"kind": "adamw-host"}}
    said = fails_with(config_of(str(tmp_path), **{**ALONE, **changes}), SHORTAGES[0])
    assert "memory.keep: auto" in said
    assert "optimizer.kind" not in said and "sequence_parallel_size" not in said


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (
            {"keep": "x,none", "gpu_bytes": "1MiB", "host_bytes": "1MiB"},
            r"The plan expected .*travelling to and from host [\d.]+ MiB",
        ),
        ({"keep": "graph,x"}, r"Graphs below layers that keep less are not planned; a process has [\d.]+ GiB\."),
    ],
)
def test_a_list_is_planned_as_far_as_the_plan_goes(tmp_path: Path, memory: dict[str, Any], said: str) -> None:
    error = fails_with(config_of(str(tmp_path), **ALONE, memory=memory), SHORTAGES[0])
    assert re.search(said, error), error
    assert "memory.keep: auto, and nothing else in memory" in error


@pytest.mark.dist
def test_replicas_can_share_a_sequence(run_ranks: RunRanks, tmp_path: Path) -> None:
    config = config_of(str(tmp_path), sequence_parallel_size=1, engine="ddp")
    for said in run_ranks(2, fails_with, config, SHORTAGES[0]):
        assert "sequence_parallel_size: 2" in said


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes differ") as raised:
        fails_with(config_of(str(tmp_path), **ALONE), RuntimeError("shapes differ"))
    assert not isinstance(raised.value, TrainingError)

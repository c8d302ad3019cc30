"""A plan's own budget never refuses its own step: what backward makes again is counted in it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import longspan
from longspan.integrations.shapes import model_shape
from longspan.keep import Keep, Memory
from longspan.plan.library import find_machine
from longspan.plan.machine import Cluster, KernelRate
from longspan.plan.memory import Ledger
from longspan.plan.setup import Optimizer, Setup
from longspan.plan.solve import solve
from models import build
from pool import RunRanks

pytestmark = pytest.mark.dist

TOKENS, LAYERS, CASES = 67, 6, 32
MOVING = 1  # bytes on their way: computing waits for each copy
SLOW = replace(find_machine("h200"), kernels=(KernelRate("cpu", 0.001, 0.001),))  # running attention again is the worst


def planned(model: Any, draw: random.Random) -> Memory | None:
    """Plan for a GPU and a host with room for a few layers each; None if that does not do."""
    setup = Setup(
        model_shape(model),
        Cluster(SLOW, 1, 1, 0, 0),
        "single",
        Optimizer("free", 0, 1e-9, 0, 0, 0),
        1,
        1,
        TOKENS,
        tile_tokens=draw.choice([17, 29, TOKENS]),
        compiled=False,
    )
    x_bytes = TOKENS * model.config.hidden_size * setup.itemsize
    needed = max(moment.total for moment in Ledger(setup, MOVING).moments)
    gpu, host = (int(x_bytes * draw.uniform(0, most)) for most in (4, 9))
    nothing = dict.fromkeys(("RESERVE_BYTES", "RESERVE_SHARE", "HOST_RESERVE_BYTES", "HOST_RESERVE_SHARE"), 0)
    with patch.multiple("longspan.plan.memory", **nothing), patch("longspan.plan.solve.MOVING_BYTES", MOVING):
        choice = solve(replace(setup, cluster=Cluster(SLOW, 1, 1, round(needed) + gpu, host)))
    return None if choice is None else choice.memory


def steps(family: str) -> Counter[str]:
    """Train a step under each plan; count them by what is made again."""
    draw, model = random.Random(0), build(family, torch.bfloat16, layers=LAYERS)
    ids, found = torch.arange(TOKENS)[None] % 30, Counter[str]()
    for _ in range(CASES):
        memory = planned(model, draw)
        if memory is None:
            continue
        handle = longspan.prepare(model, 1, memory=memory)
        model(**handle.shard({"input_ids": ids, "labels": ids})).loss.backward()
        usage, budget = handle.stash.usage.peak, memory.budget
        handle.remove()
        if budget.gpu_bytes is None:  # all fits the GPU
            continue
        assert usage["gpu"] <= budget.gpu_bytes and usage["host"] <= budget.host_bytes
        found["rebuilt" if Keep.NONE in memory.decisions else "own" if Keep.X in memory.decisions else "kept"] += 1
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_planned_step_is_not_refused(run_ranks: RunRanks, family: str) -> None:
    """Heads of qwen3 are wider together than its hidden states."""
    (found,) = run_ranks(1, steps, family, timeout_s=300)
    assert sum(found.values()) >= CASES // 3 and found["rebuilt"] and found["own"], found

"""Tensors come back from every tier as they went in, however late copies run."""

from __future__ import annotations

import copy
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lazy import LazyLane
from longspan.errors import ConfigError, ModelError
from longspan.keep import Budget
from longspan.plan.kept import Tier
from longspan.stream.stash import Stash

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int32]


def some(draw: random.Random) -> Tensor:
    shape = [draw.randint(0 if draw.random() < 0.1 else 1, 9) for _ in range(3)]
    made = torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(draw.randint(0, 99)))
    made = made.to(draw.choice(DTYPES))
    return made.transpose(0, 2) if draw.random() < 0.3 else made


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_tensors_come_back(tmp_path: Path, seed: int, lazy: bool) -> None:
    draw = random.Random(seed)
    with patch("longspan.stream.stores.Lane", LazyLane) if lazy else patch("time.time", time.time):
        stash = Stash(CPU, Budget(4_000, 20_000, str(tmp_path)), portion=1000, chunk=100)
        held: list[tuple[tuple[Tensor, ...], list[Tensor]]] = []
        for _ in range(120):
            action = draw.random()
            if action < 0.5:
                tensors = [some(draw) for _ in range(draw.randint(1, 4))]
                truth = [t.clone() for t in tensors]
                held.append((stash.put(tensors, draw.choice(list(Tier))), truth))
                del tensors
            elif held and action < 0.6:
                stash.fetcher(draw.choice(held)[0])()
            elif held and action < 0.65:
                del held[draw.randrange(len(held))]
            elif held and action < 0.8:
                stood, truth = draw.choice(held)
                assert all(torch.equal(a, b) for a, b in zip(stash.get(stood), truth, strict=True))
                del stood
            elif held:
                stood, truth = held.pop(draw.randrange(len(held)))
                found = stash.get(stood)
                del stood
                assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, truth, strict=True))
                del found
        held.clear()
        stash.settle()
        usage = stash.usage
        assert not any(usage.now.values()), usage.now
        assert usage.peak[Tier.GPU] <= 4_000 and usage.peak[Tier.HOST] <= 20_000
        assert usage.peak[Tier.FILE] > 0


def test_what_stands_for_a_tensor_can_be_read_once_copies_are_finished(tmp_path: Path) -> None:
    with patch("longspan.stream.stores.Lane", LazyLane):
        stash = Stash(CPU, Budget(0, 1000, str(tmp_path)), chunk=16)
        truth = torch.arange(20.0)
        for tier in (Tier.HOST, Tier.FILE):
            (stood,) = stash.put([truth.clone()], tier)
            stash.finish()
            assert torch.equal(stood, truth)
            assert torch.equal(stash.get([stood.clone()])[0], truth), "a copy that a hook made"


def test_a_full_tier_passes_on_to_the_next(tmp_path: Path) -> None:
    t = torch.zeros(16, dtype=torch.float64)
    stash = Stash(CPU, Budget(128, 128, str(tmp_path)))
    held = [stash.put([t.clone()], tier) for tier in (Tier.HOST, Tier.HOST, Tier.GPU, Tier.GPU)]
    assert [stash.usage.now[tier] for tier in Tier] == [128, 128, 2 * 4096]
    held.clear()
    stash = Stash(CPU, Budget(128, 128))
    held = [stash.put([t.clone()], tier) for tier in (Tier.HOST, Tier.HOST)]
    assert stash.usage.now[Tier.GPU] == 128, "a faster one, when the slower ones are full"
    with pytest.raises(ConfigError, match="keep 128 bytes .* 128 bytes are missing"):
        stash.put([t.clone()], Tier.GPU)


def test_views_of_one_storage_count_once() -> None:
    stash = Stash(CPU, Budget(1000))
    whole = torch.zeros(10, 10)
    stood = stash.put([whole[:3], whole[3:]], Tier.GPU)
    assert stash.usage.now[Tier.GPU] == 400
    del whole, stood
    assert stash.usage.now[Tier.GPU] == 0 and stash.usage.peak[Tier.GPU] == 400


def test_a_change_while_it_leaves_is_refused() -> None:
    stash = Stash(CPU, Budget(0, 1000))
    t = torch.zeros(4)
    held = stash.put([t], Tier.HOST)
    t.add_(1)
    with pytest.raises(ModelError, match="changed in place"):
        stash.settle()
    stash.settle()
    del held


def test_what_was_fetched_for_nobody_goes() -> None:
    stash = Stash(CPU, Budget(0, 1000))
    stood = stash.put([torch.zeros(4)], Tier.HOST)
    fetch = stash.fetcher(stood)
    fetch()
    stash.settle()
    assert stash.usage.now["moving"] == 16
    del stood
    stash.settle()
    assert stash.usage.now["moving"] == 0
    fetch()
    assert stash.usage.now["moving"] == 0


def test_a_copy_has_memory_of_its_own(tmp_path: Path) -> None:
    stash = Stash(CPU, Budget(0, 1000, str(tmp_path)))
    held = stash.put([torch.zeros(4)], Tier.HOST)
    twin = copy.deepcopy(stash)
    assert twin.budget == stash.budget and twin.usage.now[Tier.HOST] == 0
    assert held[0].tolist() == [0] * 4


def test_a_closed_stash_gives_its_file_back(tmp_path: Path) -> None:
    stash = Stash(CPU, Budget(0, 0, str(tmp_path)))
    held: Any = stash.put([torch.ones(4)], Tier.FILE)
    stash.close()
    assert stash.get(held)[0].tolist() == [1] * 4
    before = len(os.listdir("/proc/self/fd"))
    del held
    stash.settle()
    assert not any(stash.usage.now.values())
    assert len(os.listdir("/proc/self/fd")) < before


def test_what_a_layer_keeps_is_divided_in_order() -> None:
    """Tensors that share memory stay together, whatever stands between them, and each comes back in its place."""
    stash = Stash(CPU, Budget(800, 1_000), portion=1000)
    shared = torch.arange(100, dtype=torch.float64)
    tensors = [shared[:50], torch.full((90,), 2.0, dtype=torch.float64), shared[50:]]
    truth = [t.clone() for t in tensors]
    stood = stash.put(tensors, Tier.GPU)
    found = stash.get(stood)
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    usage = stash.usage.now
    assert usage[Tier.GPU] == 800 and usage[Tier.HOST] >= 720


def test_without_a_budget_memory_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of many tiles is counted once, not tile by tile."""
    stash, counted = Stash(CPU, Budget()), []
    measure = Stash._measure
    monkeypatch.setattr(Stash, "_measure", lambda self: counted.append(measure(self)))
    stash.put([torch.zeros(4) for _ in range(50)], Tier.GPU)
    assert len(counted) == 1


def calls(work: Callable[[], Any]) -> int:
    """Count the functions that work calls, in Python and in C."""
    count = 0

    def called(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # finalizers of what others left would count too
    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])
def test_a_tile_costs_the_same_whatever_is_held(tier: Tier) -> None:
    stash = Stash(CPU, Budget(1 << 20, 1 << 20), portion=1 << 20)
    held, counts = [], []
    for more in (20, 300, 300):
        held += [stash.put([torch.ones(4)], tier) for _ in range(more)]
        stash.settle()
        tile = [torch.ones(4), torch.ones(4)]
        assert stash.usage.now[tier]  # what has died is forgotten
        counts.append(calls(lambda: stash.get(stash.put(tile, tier))))  # noqa: B023
        held.pop(len(held) // 2)
    assert counts[0] == counts[1] == counts[2], counts

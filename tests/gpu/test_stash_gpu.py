"""Kept tensors outside the GPU: the same bits, less memory, and a host that never waits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan.keep import Budget, Keep, Memory
from longspan.plan.kept import Tier
from longspan.stream.function import StreamedLayer
from longspan.stream.stash import Stash

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda", 0)
LAYERS, HIDDEN, TOKENS = 8, 512, 8192
HOST, FILE = Budget(0, 2 << 30), Budget(0, 0, tempfile.gettempdir())
KEEPS = {
    "x+O": (Keep.X_O,) * LAYERS,
    "out": (Keep.X_O, *(Keep.OUT,) * (LAYERS - 1)),
    "none": (Keep.X, *(Keep.NONE,) * (LAYERS - 1)),
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.FILE])
def test_slow_copies_neither_lose_nor_mix_tensors(tier: Tier) -> None:
    """Memory that is let go too early is written over at once, as copies are held up."""
    budget = Budget(0, 1 << 28, tempfile.gettempdir())
    stash = Stash(DEVICE, budget, portion=3 << 20, chunk=1 << 20)
    lane = stash._stores[tier].lane  # type: ignore[attr-defined]
    size = (1 << 20) + 17
    for _ in range(2):
        held = []
        for number in range(12):
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(20_000_000)
            x = torch.full((size,), float(number), device=DEVICE)
            wide = torch.full((3, 5000), -float(number), device=DEVICE, dtype=torch.bfloat16)
            held.append(stash.put([x, wide.t()], tier))
            del x, wide
            torch.full((size,), torch.nan, device=DEVICE)
        stash.settle()
        for number in reversed(range(12)):
            if number:
                stash.fetcher(held[number - 1])()
            x, wide = stash.get(held.pop())
            assert x.shape == (size,) and wide.shape == (5000, 3)
            assert bool((x == number).all()) and bool((wide == -number).all())
            del x, wide
            torch.full((size,), torch.nan, device=DEVICE)
        stash.settle()
        assert not any(stash.usage.now.values())


def build() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=512,
        max_position_embeddings=1 << 20,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).to(DEVICE).train()


@contextmanager
def never_waiting() -> Iterator[None]:
    """Let layers raise where the host waits for the GPU."""
    real_forward, real_backward = StreamedLayer.forward, StreamedLayer.backward

    def forward(*args: Any) -> Any:
        with _strict():
            return real_forward(*args)

    def backward(*args: Any) -> Any:
        with _strict():
            return real_backward(*args)

    with (
        patch.object(StreamedLayer, "forward", staticmethod(forward)),
        patch.object(StreamedLayer, "backward", staticmethod(backward)),
    ):
        yield


@contextmanager
def _strict() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step(model: Any, part: Any) -> list[Tensor]:
    model.zero_grad()
    loss = model(**part).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def run(model: Any, memory: Memory, kernel: str, strict: bool) -> tuple[list[Tensor], int, Any]:
    """Train two steps -> loss and gradients of the second, its peak memory, and bytes per tier."""
    handle = longspan.prepare(model, 1, kernel=kernel, memory=memory)
    ids = torch.randint(512, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    part = handle.shard({"input_ids": ids, "labels": ids.clone()})
    step(model, part)
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if strict:
        with never_waiting():
            results = step(model, part)
    else:
        results = step(model, part)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    usage = handle.stash.usage
    handle.remove()
    return results, peak, usage


@pytest.mark.parametrize("keep", KEEPS)
def test_the_same_bits_from_every_tier(keep: str) -> None:
    model = build()
    mixed = Budget(20 << 20, 40 << 20, tempfile.gettempdir())
    wanted, _, usage = run(model, Memory(2048, KEEPS[keep]), "reference", strict=True)
    assert usage.peak[Tier.GPU] > 0 and usage.peak[Tier.HOST] == 0
    for budget in (HOST, FILE, mixed):
        found, _, usage = run(model, Memory(2048, KEEPS[keep], budget=budget), "reference", strict=budget is HOST)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), budget
        assert usage.peak[Tier.GPU] <= (budget.gpu_bytes or 0) and not any(usage.now.values())
        assert usage.peak[Tier.HOST] + usage.peak[Tier.FILE] > 0


def test_memory_leaves_the_gpu() -> None:
    """Per layer: hidden states, and as much attention output (4 heads of 128)."""
    model = build()
    layer = 2 * TOKENS * HIDDEN * 2
    _, on_gpu, usage = run(model, Memory(2048, Keep.X_O), "auto", strict=True)
    assert usage.peak[Tier.GPU] >= LAYERS * layer
    _, on_host, usage = run(model, Memory(2048, Keep.X_O, budget=HOST), "auto", strict=True)
    assert usage.peak[Tier.HOST] >= LAYERS * layer and usage.peak[Tier.GPU] == 0
    assert on_gpu - on_host > (LAYERS - 4) * layer, "one leaves, one comes, and two are at work"
    _, on_file, _ = run(model, Memory(2048, Keep.X_O, budget=FILE), "auto", strict=False)
    assert on_gpu - on_file > (LAYERS - 4) * layer


def test_pinned_memory_is_given_back() -> None:
    model = build()
    handle = longspan.prepare(model, 1, memory=Memory(2048, Keep.X_O, budget=HOST))
    ids = torch.randint(512, (1, TOKENS))
    step(model, handle.shard({"input_ids": ids, "labels": ids.clone()}))
    store: Any = handle.stash._stores[Tier.HOST]
    memory = store.memory
    assert memory.pinned and memory.bytes[:8].is_pinned()
    view = memory.bytes[:8]
    del store, memory
    handle.remove()
    assert not view.is_pinned()

"""Checkpoint inputs in pinned host memory next to real streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import longspan

pytestmark = pytest.mark.gpu

LAYERS, D = 12, 1024


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(LAYERS)).to("cuda", torch.bfloat16)

    def forward(self, x: Tensor, reentrant: bool = False) -> Tensor:
        x = x * 1
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: x + layer(x).tanh(), x, use_reentrant=reentrant)
        return x.float().square().mean()


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_streams": False}, {"use_pin_memory": False}, {"max_fwd_stash_count": 0, "keep_last_count": 0}],
    ids=str,
)
def test_gradients_are_equal_bit_for_bit(settings: dict[str, Any], reentrant: bool) -> None:
    model, context = Stack(), longspan.offload_checkpoints(**settings)
    for tokens in (5000, 40_000, 7, 40_000, 13_000, 40_000):
        x = torch.randn(1, tokens, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        wanted = gradients(model, model(x, reentrant))
        with context:
            found = gradients(model, model(x, reentrant))
        assert all(map(torch.equal, found, wanted))
    assert len(context.pool.idle) == LAYERS - settings.get("keep_last_count", 1)
    assert all(
        chunk.is_pinned() == settings.get("use_pin_memory", True) for b in context.pool.idle for chunk in b.chunks
    )


def test_the_inputs_leave_the_device() -> None:
    model = Stack()
    x = torch.randn(1, 64 * 1024, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    size = x.numel() * 2
    peaks = []
    for context in (torch.enable_grad(), longspan.offload_checkpoints(), longspan.offload_checkpoints()):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        with context:
            gradients(model, model(x))
        peaks.append((torch.cuda.max_memory_allocated() - start) / size)
    assert peaks[0] - peaks[1] > LAYERS - 1 - 3 - 1.5, peaks
    assert peaks[2] == pytest.approx(peaks[1], abs=0.5)


def test_graphs_without_backward_leave_nothing() -> None:
    model, context = Stack(), longspan.offload_checkpoints()
    x = torch.randn(1, 8192, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wanted = gradients(model, model(x))
    start = torch.cuda.memory_allocated()
    for _ in range(3):
        with context:
            model(x)
    with context:
        loss = model(x)
        torch.autograd.grad(loss, list(model.layers[-1].parameters()))  # fetches ahead what nobody will want
        del loss
        y = torch.full_like(x, 3)
    assert bool((y == 3).all())
    del y
    assert torch.cuda.memory_allocated() <= start + x.numel() * 2
    with context:
        assert all(map(torch.equal, gradients(model, model(x)), wanted))

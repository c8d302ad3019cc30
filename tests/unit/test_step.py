"""What a step holds of its micro-batches while it runs them."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from longspan.train.packing import Step
from longspan.train.pulse import Pulse
from longspan.train.step import _backward


class Context:
    """Stands for a `Shard`, in which layers leave tensors on the device."""


def test_a_micro_batch_is_gone_before_the_next_runs() -> None:
    """With what was worked out for it on the device: memory does not grow with accumulation."""
    contexts = [Context() for _ in range(3)]
    seen = [weakref.ref(context) for context in contexts]
    step = Step([{"ids": torch.ones(1), "context": context} for context in contexts], 3, 3, [3])
    contexts.clear()
    alive: list[list[bool]] = []
    lasts: list[bool] = []

    @contextmanager
    def accumulating(last: bool) -> Any:
        lasts.append(last)
        yield

    def forward(ids: torch.Tensor, context: Context) -> Any:
        alive.append([ref() is not None for ref in seen])
        return SimpleNamespace(loss=ids.sum())

    trainee: Any = SimpleNamespace(
        device=torch.device("cpu"),
        meter=SimpleNamespace(phase=lambda name: nullcontext()),
        module=forward,
        engine=SimpleNamespace(accumulating=accumulating, backward=lambda loss: None, reduce=lambda: None),
    )
    assert _backward(trainee, step, Pulse()) == 3
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]
    assert lasts == [False, False, True]

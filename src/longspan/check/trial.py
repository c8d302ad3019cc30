"""A model made ready for one round of a check, and given back."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.check.settings import Settings
from longspan.engines import Engine, build_engine
from longspan.integrations.transformers import Applied, prepare


@dataclass(frozen=True)
class Trial:
    """A prepared model and the engine that holds its parameters."""

    handle: Applied
    module: nn.Module
    engine: Engine

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients, whole. Cost: one all-gather per sharded parameter."""
        found = {name: p.grad.detach() for name, p in self.module.named_parameters() if p.grad is not None}
        return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found.items()}


@contextmanager
def trial(model: nn.Module, settings: Settings, ulysses: int | None, ring: int | None, logits: bool) -> Iterator[Trial]:
    """Prepare a model, or a copy of it if the engine changes parameters for good, and undo it.

    FSDP2 holds parameters of at least float32 and computes in the model's type, as it does in training.
    """
    sharded = settings.engine == "fsdp2"
    compute_dtype: torch.dtype | None = None
    if sharded:
        model = copy.deepcopy(model)
        if next(model.parameters()).dtype is torch.bfloat16:
            compute_dtype = torch.bfloat16
            model.float()
    engine = build_engine(settings.engine, settings.sp, compute_dtype)
    options: dict[str, Any] = {"kernel": settings.kernel, "memory": settings.memory or "auto", "logits": logits}
    with contextlib.redirect_stderr(io.StringIO()):  # the plan is printed once per call; the result says what it was
        handle = prepare(
            model,
            settings.sp,
            ulysses_degree=ulysses,
            ring_degree=ring,
            grad_reduction=engine.grad_reduction,
            **options,
        )
    try:
        yield Trial(handle, engine.wrap(model, handle), engine)
    finally:
        handle.remove()

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

from longspan.check.settings import Settings
from longspan.engines import Engine, build_engine
from longspan.engines.protocol import StepsItself
from longspan.integrations.transformers import Applied, prepare


@dataclass(frozen=True)
class Trial:
    """A prepared model and the engine that holds its parameters."""

    handle: Applied
    module: nn.Module
    engine: Engine

    def take_gradients(self) -> dict[str, Tensor]:
        """Return all gradients, whole, and leave none behind. Cost: one all-gather per sharded parameter."""
        found = {name: self.engine.gradient(p) for name, p in self.handle.model.named_parameters()}
        taken = {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
        if isinstance(self.engine, StepsItself):
            self.engine.step()
        else:
            self.module.zero_grad(set_to_none=True)
        return taken


@contextmanager
def trial(model: nn.Module, settings: Settings, ulysses: int | None, ring: int | None, logits: bool) -> Iterator[Trial]:
    """Prepare a model, or a copy of it if the engine changes parameters for good, and undo it.

    FSDP2 and ZeRO hold parameters of at least float32 and compute in the model's type, as they do in training; beside
    adapters they hold them in the model's type.
    """
    sharded = settings.engine != "single"
    compute_dtype: torch.dtype | None = None
    if sharded:
        model = copy.deepcopy(model)
        if next(model.parameters()).dtype is torch.bfloat16 and settings.adapter is None:
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
        module = engine.wrap(model, handle)
        if isinstance(engine, StepsItself):
            engine.adopt(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0), None)
        yield Trial(handle, module, engine)
    finally:
        if isinstance(engine, StepsItself):
            engine.close()
            for parameter in model.parameters():
                vars(parameter).clear()  # stage 3's part of a copy that is done with
        handle.remove()

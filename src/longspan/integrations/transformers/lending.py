"""Random weights for a while, so that a model that has none yet can be probed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from longspan.integrations.random_weights import lively

if TYPE_CHECKING:
    from longspan.integrations.transformers.parts import Parts

_SEED = 23


@contextmanager
def lent(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Give the own parameters of modules that are on the meta device random values, the same on every process.

    What a model computes from them tells what its code does with tokens, whatever the weights will be.

    Cost: memory for these parameters on the device, until it ends.
    """
    slots = [(m, key, p) for m in modules for key, p in m._parameters.items() if p is not None and p.is_meta]
    generator = torch.Generator(device).manual_seed(_SEED)
    made: dict[int, nn.Parameter] = {}
    try:
        for owner, key, blank in slots:
            if id(blank) not in made:
                noise = torch.empty_like(blank, device=device, requires_grad=False).normal_(generator=generator)
                values = lively(f".{key}", noise, 0.0 if key.endswith("bias") else 1.0)
                made[id(blank)] = nn.Parameter(values, requires_grad=False)
            owner._parameters[key] = made[id(blank)]
        yield
    finally:
        for owner, key, blank in slots:
            owner._parameters[key] = blank


@contextmanager
def lending(parts: Parts) -> Iterator[None]:
    """Let a model on the meta device run on tokens: what is outside its layers has weights, a layer while it runs.

    Cost: memory on the device for what is outside the layers and for one layer; each call of a layer draws its weights.
    """
    if not parts.blank:
        yield
        return
    loans: dict[nn.Module, ExitStack] = {}

    def lend(layer: nn.Module, args: Any) -> None:
        loans[layer] = ExitStack()
        loans[layer].enter_context(lent(layer.modules(), parts.device))

    def take_back(layer: nn.Module, args: Any, out: Any) -> None:
        loans.pop(layer).close()

    unused = () if parts.sight is None else parts.sight.tower.modules()  # text has no use for it
    apart = {*parts.layers.modules(), *unused}
    with ExitStack() as stack:
        for layer in cast(Iterable[nn.Module], parts.layers):
            stack.callback(layer.register_forward_pre_hook(lend).remove)
            stack.callback(layer.register_forward_hook(take_back, always_call=True).remove)
        stack.enter_context(lent([m for m in parts.model.modules() if m not in apart], parts.device))
        yield

"""The routers of expert layers in a transformers model, as the model itself declares them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longspan.batch import Shard
from longspan.errors import ModelError
from longspan.integrations.transformers.parts import Parts
from longspan.stream.routing import Choices, Router, Routing, Tap

ROUTER_LOGITS = "output_router_logits"
"""Argument, or setting of the config, that asks transformers for the router's auxiliary loss."""

_LOSS = "load_balancing_loss_func"
"""Name that modelling files of transformers give to the auxiliary loss."""


@dataclass
class Routers:
    """The router of a model, if its auxiliary loss can be computed for a divided sequence, or why not."""

    router: Router | None = None
    why_not: str = ""
    gates: Sequence[nn.Module] = ()
    hooks: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Parts) -> Routers:
        """Find the gates by what the model declares as its router logits."""
        name = type(parts.model).__name__
        declared: Any = (getattr(parts.trunk, "_can_record_outputs", None) or {}).get("router_logits")
        target = getattr(declared, "target_class", None)
        if target is None:
            return cls(why_not=f"{name} does not declare which of its modules make router logits.")
        within = f".{(declared.layer_name or '').strip('.')}.".replace("..", ".")
        gates = [m for n, m in parts.trunk.named_modules() if isinstance(m, target) and within in f".{n}."]
        if not gates:
            return cls(why_not=f"no layer of this {name} has a router.")
        experts, top_k = (getattr(parts.model, key, None) for key in ("num_experts", "num_experts_per_tok"))
        loss, factor = own_loss(parts.model), getattr(parts.model, "router_aux_loss_coef", None)
        if loss is None or factor is None or not isinstance(experts, int) or not isinstance(top_k, int):
            return cls(why_not=f"longspan does not know how {name} makes an auxiliary loss of its router logits.")
        router = Router(Tap(declared.index), experts, top_k)
        if not _agrees(loss, router):
            return cls(why_not=f"{name} makes another auxiliary loss of its router logits than longspan knows.")
        return cls(router, gates=gates)

    def known(self) -> Router:
        """Return the router.

        Raises:
            ModelError: its loss cannot be computed for a divided sequence; says why.
        """
        if self.router is None:
            raise ModelError(f"{ROUTER_LOGITS}=True: {self.why_not} Set it to False.")
        return self.router

    def install(self) -> None:
        """Hang a hook on every gate; it does nothing but when the loss is asked for."""
        if self.router is not None:
            self.hooks = [gate.register_forward_hook(self.router.tap) for gate in self.gates]

    def remove(self) -> None:
        """Take the hooks off the gates."""
        for hook in self.hooks:
            hook.remove()


class GateLogits:
    """Logits of every gate of a model in one forward pass, in whatever tiles its layers run."""

    def __init__(self, routers: Routers, shard: Shard) -> None:
        self.shard, self.index = shard, routers.known().tap.index
        self.heard: dict[nn.Module, list[Tensor]] = {gate: [] for gate in routers.gates}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the gates meanwhile; layers must not be compiled."""
        hooks = [gate.register_forward_hook(self._hear) for gate in self.heard]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hear(self, gate: nn.Module, args: Any, output: Any) -> None:
        logits: Tensor = output[self.index] if isinstance(output, tuple) else output
        self.heard[gate].append(logits.detach().reshape(self.shard.rows, -1, logits.shape[-1]))

    def taken(self) -> tuple[Tensor, ...]:
        """Return those of each gate, [B, s, E] of this rank's tokens; whoever differentiates them is refused.

        Raises:
            ModelError: a gate did not see each token once.
        """
        tokens, every = self.shard.layout.shard_tokens, []
        for tiles in self.heard.values():
            if sum(tile.shape[1] for tile in tiles) != tokens:
                raise ModelError(
                    f"A gate did not see each of {tokens} tokens once, so its logits are not known. Change experts "
                    "before longspan.prepare."
                )
            every.append(_Constant.apply(torch.cat(tiles, 1), torch.zeros((), requires_grad=True)))
        return tuple(every)


class _Constant(torch.autograd.Function):
    """Let values through, and refuse their gradient; the anchor makes autograd come this way."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        raise ModelError(
            "router_logits of a prepared model have no way back to the layers: detach them. The router's auxiliary "
            "loss is in out.loss, and out.aux_loss, with its gradients."
        )


def real_tokens(shard: Shard, device: torch.device) -> Tensor | None:
    """Return which of a rank's tokens are no padding, booleans [B, s]; None if all are."""
    layout, lengths = shard.layout, shard.lengths
    if lengths is None and layout.length == layout.tokens:
        return None
    held = torch.tensor(lengths or [layout.tokens] * shard.rows)[:, None]
    real = shard.cut((torch.arange(layout.tokens) < held).to(torch.uint8)).bool()
    return None if bool(real.all()) else real.to(device, non_blocking=True)


def own_loss(model: nn.Module) -> Callable[..., Any] | None:
    """Return the auxiliary loss of a model's modelling file: (router logits, experts, top_k, mask) -> 0-d."""
    modules = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    return next((getattr(m, _LOSS) for m in modules if hasattr(m, _LOSS)), None)


def _agrees(theirs: Callable[..., Any], router: Router) -> bool:
    """Whether a model's auxiliary loss is ours, on some logits of two layers."""
    noise = torch.Generator().manual_seed(11)
    logits = tuple(torch.randn(9, router.experts, generator=noise) for _ in range(2))
    try:
        wanted = float(theirs(logits, router.experts, router.top_k, None))
    except (TypeError, ValueError, RuntimeError):
        return False
    first, second = (Routing(router, 1, None).of([each]) for each in logits)
    return abs(_value(first.plus(second), router.top_k) - wanted) <= 1e-4 * abs(wanted)


def _value(choices: Choices, top_k: int) -> float:
    pairs = float(choices.counts.sum()) / top_k
    return float(len(choices.counts) * (choices.counts / pairs * choices.probabilities / pairs).sum())

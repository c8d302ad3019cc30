"""How a layer's attention call is answered: by an object that travels with the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.kernels.protocol import Score
from longspan.recurrent.call import Recurrence

_HARMLESS = frozenset({"position_ids", "use_cache", "num_items_in_batch"})
"""Keyword arguments that models hand to attention without expecting anything from it."""


class Kind(NamedTuple):
    """What tells attention calls apart for which kernels are picked: head dims of queries and values, and whether the
    layer has a window or caps its scores."""

    head_dim: int
    v_head_dim: int
    window: bool
    softcap: bool


class Form(NamedTuple):
    """What a layer asks of attention besides its tensors: the same each time that its code runs."""

    score: Score
    window: int | None


@dataclass(frozen=True)
class Window:
    """Stands for a layer's mask: causal order within so many tokens, each token's own included."""

    tokens: int


@dataclass(frozen=True)
class Request:
    """One attention call of a layer: q [B, H, S, D], k [B, K, S, D], v [B, K, S, Dv] after RoPE, cast already where
    autocast is on: who answers the call may do so later, outside of it.

    Args:
        extra: further keyword arguments of the layer.
        window: tokens that each token sees at most, itself included; None for all before it.
        sinks: [H] scores that take a share of each head's softmax, with a gradient; or None.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    score: Score
    extra: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def kind(self) -> Kind:
        """What its kernel is picked by."""
        return Kind(self.q.shape[-1], self.v.shape[-1], self.window is not None, self.score.softcap is not None)

    @property
    def layer(self) -> str:
        """Name the calling module for messages."""
        index = getattr(self.module, "layer_idx", None)
        return type(self.module).__name__ + ("" if index is None else f" of layer {index}")

    @property
    def form(self) -> Form:
        """What is no tensor of it."""
        return Form(self.score, self.window)

    def tensors(self, wanted: str) -> tuple[Tensor, ...]:
        """Return those of q, k and v that are wanted, and with all of them the sinks if there are any."""
        sinks = () if self.sinks is None or wanted != "qkv" else (self.sinks,)
        return (*(getattr(self, name) for name in wanted), *sinks)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, S, H, D], k [B, S, K, D], v [B, S, K, Dv]."""
        q, (k, v) = self.query(), self.keys()
        if not q.dtype == k.dtype == v.dtype:
            raise ModelError(f"{self.layer} hands attention q, k, v of {q.dtype}, {k.dtype}, {v.dtype}.")
        return q, k, v

    def differentiable(self) -> tuple[Tensor, ...]:
        """Return q [B, S, H, D], k and v, and the sinks if there are any."""
        return self.operands() if self.sinks is None else (*self.operands(), self.sinks)

    def query(self) -> Tensor:
        """Return q alone."""
        return self.q.transpose(1, 2)

    def keys(self) -> tuple[Tensor, Tensor]:
        """Return k and v."""
        return self.k.transpose(1, 2), self.v.transpose(1, 2)

    def refuse_unknown(self, handed_through: frozenset[str]) -> None:
        """Raise if the layer asks for something that would change the result and is not supported.

        Args:
            handed_through: names that the caller of the model passed, and that models only hand on.
        """
        for name, value in self.extra.items():
            if value is None or value is False or name in _HARMLESS or name in handed_through:
                continue
            shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ModelError(
                f"{self.layer} asks attention for {name}={shown}, which longspan does not support yet; "
                "leaving it out would change the result."
            )


def autocast(t: Tensor) -> Tensor:
    """Cast to autocast's dtype where it is on, as the attention functions of torch do."""
    device = t.device.type
    return t.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else t


class Call(Protocol):
    """What a forward pass carries to the token mixers of its layers."""

    def mix(self, request: Request | Recurrence) -> Tensor:
        """Answer one call -> [B, S, H, Dv], with the query heads of attention or the value heads of a recurrence."""
        ...

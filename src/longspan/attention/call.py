"""How a layer's attention call is answered: by an object that travels with the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.recurrent.call import Recurrence

_HARMLESS = frozenset({"position_ids", "use_cache", "num_items_in_batch"})
"""Keyword arguments that models hand to attention without expecting anything from it."""


@dataclass(frozen=True)
class Request:
    """One attention call of a layer: q [B, H, S, D], k [B, K, S, D], v [B, K, S, Dv] after RoPE, cast already where
    autocast is on: who answers the call may do so later, outside of it."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    extra: dict[str, Any]

    @property
    def layer(self) -> str:
        """Name the calling module for messages."""
        index = getattr(self.module, "layer_idx", None)
        return type(self.module).__name__ + ("" if index is None else f" of layer {index}")

    @property
    def form(self) -> float:
        """What is no tensor of it."""
        return self.scale

    def tensors(self, wanted: str) -> tuple[Tensor, ...]:
        """Return those of q, k and v that are wanted."""
        return tuple(getattr(self, name) for name in wanted)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, S, H, D], k [B, S, K, D], v [B, S, K, Dv]."""
        q, (k, v) = self.query(), self.keys()
        if not q.dtype == k.dtype == v.dtype:
            raise ModelError(f"{self.layer} hands attention q, k, v of {q.dtype}, {k.dtype}, {v.dtype}.")
        return q, k, v

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

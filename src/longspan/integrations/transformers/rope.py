"""Rotary tables of a shard that equal those of the whole batch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.errors import ModelError

if TYPE_CHECKING:
    from longspan.integrations.transformers.applied import Applied

EXACT_FLOAT32_POSITIONS = 1 << 15
"""Up to here the model's own tables are used: an angle computed in fp32 is off by at most p * 2**-24 = 2**-9, half the
spacing of bf16 near 1. Further on angles are computed in float64."""


class Rotary:
    """Stands in for the `forward` of a rotary embedding.

    Dynamic NTK and LongRoPE choose their frequencies by the largest position they are shown; a shard sees only its own
    positions, so the largest of the whole batch is shown as one more token and dropped from the tables.
    """

    def __init__(self, module: nn.Module, applied: Applied) -> None:
        self.module, self.applied = module, applied
        self.original = module.forward
        self.plain = _has_plain_angles(module, self.original)
        functools.update_wrapper(self, self.original)

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        call = self.applied.call
        if call is None:
            return self.original(x, position_ids, *args, **kwargs)
        largest = call.shard.max_position
        shown = torch.cat([position_ids, torch.full_like(position_ids[:, :1], largest)], dim=1)
        cos, sin = self.original(x, shown, *args, **kwargs)
        if largest < EXACT_FLOAT32_POSITIONS:
            return cos[:, :-1], sin[:, :-1]
        if not self.plain:
            raise ModelError(
                f"{type(self.module).__name__} computes its angles in a way longspan does not know, and in fp32 they "
                f"lose accuracy beyond position {EXACT_FLOAT32_POSITIONS}; this batch reaches {largest}."
            )
        return wide_tables(self.module, position_ids, cos.dtype)


def wide_tables(module: nn.Module, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cos and sin [B, S, D] from the module's current frequencies with float64 angles."""
    frequencies: Any = module.inv_freq
    scaling: Any = getattr(module, "attention_scaling", 1.0)
    angles = position_ids[..., None].to(torch.float64) * frequencies.to(torch.float64)  # [B, S, D/2]
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def _has_plain_angles(module: nn.Module, forward: Any) -> bool:
    """Tell whether `wide_tables` gives what the module gives, tried at a few small positions."""
    frequencies: Any = module.inv_freq
    if frequencies.is_meta:
        return False
    positions = torch.tensor([[0, 1, 5]], device=frequencies.device)
    x = torch.zeros(1, 3, 1, dtype=torch.float32, device=frequencies.device)
    with torch.no_grad():
        try:
            tables = forward(x, positions)
        except TypeError:  # it takes further arguments, such as a layer type
            return False
        if not isinstance(tables, tuple) or len(tables) != 2:
            raise ModelError(
                f"{type(module).__name__} does not return cos and sin; longspan does not know what its tables mean."
            )
        own = wide_tables(module, positions, torch.float32)
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(tables, own, strict=True))

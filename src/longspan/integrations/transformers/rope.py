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
        self.axes = _axes(module, self.original)
        self.plain = {kind: _has_plain_angles(module, self.original, kind, self.axes) for kind in rotary_kinds(module)}
        functools.update_wrapper(self, self.original)

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        call = self.applied.call
        if call is None:
            return self.original(x, position_ids, *args, **kwargs)
        largest = call.shard.max_position
        shown = torch.cat([position_ids, torch.full_like(position_ids[..., :1], largest)], dim=-1)
        cos, sin = self.original(x, shown, *args, **kwargs)
        if largest < EXACT_FLOAT32_POSITIONS:
            return cos[..., :-1, :], sin[..., :-1, :]
        kind = f"{kwargs.get('layer_type', args[0] if args else None)}_"
        kind = kind if kind in self.plain else ""
        if not self.plain.get(kind):
            raise ModelError(
                f"{type(self.module).__name__} computes its angles in a way longspan does not know, and in fp32 they "
                f"lose accuracy beyond position {EXACT_FLOAT32_POSITIONS}; this batch reaches {largest}."
            )
        return wide_tables(self.module, position_ids, cos.dtype, kind, self.axes)


def rotary_kinds(module: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of a module's frequencies: "" for `inv_freq`, one per kind of layer, or none."""
    tensors = {**dict(module.named_buffers(recurse=False)), **vars(module)}
    names = [name for name, value in tensors.items() if name.endswith("inv_freq") and isinstance(value, Tensor)]
    return tuple(n.removesuffix("inv_freq") for n in names if not n.endswith(("original_inv_freq", "long_inv_freq")))


def wide_tables(
    module: nn.Module, position_ids: Tensor, dtype: torch.dtype, kind: str = "", axes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin [B, S, D] from the module's current frequencies with float64 angles.

    Args:
        position_ids: [B, S], or [3, B, S] where `axes` says by which of the three each frequency goes.
    """
    frequencies: Any = getattr(module, f"{kind}inv_freq")
    scaling: Any = getattr(module, f"{kind}attention_scaling", 1.0)
    positions = position_ids[..., None] if axes is None else position_ids.movedim(0, -1)[..., axes]
    angles = positions.to(torch.float64) * frequencies.to(torch.float64)  # [B, S, D/2]
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def _axes(module: nn.Module, forward: Any) -> Tensor | None:
    """Return which of the three rows of position ids each frequency goes by, under M-RoPE; None elsewhere.

    Tried by moving one row at a time: the sine of a frequency that goes by it is no longer zero.
    """
    frequencies: Any = getattr(module, "inv_freq", None)
    if not hasattr(module, "mrope_section") or frequencies.is_meta:
        return None
    positions = torch.eye(3, dtype=torch.long, device=frequencies.device)[..., None]
    with torch.no_grad():
        _, sin = forward(torch.zeros(1, 1, 1, device=frequencies.device), positions)
    return (sin[:, 0, : len(frequencies)] != 0).int().argmax(0)


def _has_plain_angles(module: nn.Module, forward: Any, kind: str, axes: Tensor | None) -> bool:
    """Tell whether `wide_tables` gives what the module gives, tried at small positions of a long and a short sequence.

    The short one comes last: a module that adapts to the length is left as it was.
    """
    frequencies: Any = getattr(module, f"{kind}inv_freq")
    if frequencies.is_meta:
        return False
    layer_type = {"layer_type": kind.removesuffix("_")} if kind else {}
    x = torch.zeros(1, 4, 1, dtype=torch.float32, device=frequencies.device)
    agrees = []
    for largest in (1 << 24, 6):
        positions = torch.tensor([[0, 1, 5, largest]], device=frequencies.device)
        if axes is not None:
            positions = torch.stack([positions, (positions * 3).clamp(max=largest), positions // 2])
        with torch.no_grad():
            try:
                tables = forward(x, positions, **layer_type)
            except TypeError:  # it takes other arguments
                return False
            if not isinstance(tables, tuple) or len(tables) != 2:
                raise ModelError(
                    f"{type(module).__name__} does not return cos and sin; longspan does not know what its tables mean."
                )
            own = wide_tables(module, positions, torch.float32, kind, axes)
        agrees += [
            a.shape == b.shape and torch.allclose(a[:, :3], b[:, :3], atol=1e-5)
            for a, b in zip(tables, own, strict=True)
        ]
    return all(agrees)

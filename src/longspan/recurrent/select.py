"""The choice of a gated delta rule for a device."""

from __future__ import annotations

import torch

from longspan.comm.regroup import groups_of
from longspan.recurrent.fla import FlaRule
from longspan.recurrent.rule import ChunkedRule, ReferenceRule, Rule


def divided(heads: int, size: int) -> str:
    """Say how `size` ranks divide recurrences with so many key heads."""
    groups = groups_of(heads, size)
    told = f"recurrent layers: {heads} key heads over {groups} rank{'s' if groups > 1 else ''}"
    return told if groups == size else f"{told}, states passed on between {size // groups} stretches of a row"


def pick_rule(kernel: str, device: torch.device) -> tuple[Rule, str]:
    """Return the rule that goes with a choice of kernel, and a note for the plan.

    On CUDA it is flash-linear-attention's, or PyTorch's operations where that is missing or wrong, much slower and
    as exact.

    Args:
        kernel: the choice for attention; `reference` stands for the slow rule too.
    """
    if kernel == "reference":
        return ReferenceRule(), "gated delta rule token by token, by kernel='reference'"
    missing = FlaRule.missing(device)
    if missing is None:
        return FlaRule(), "gated delta rule of flash-linear-attention"
    if device.type != "cuda":
        return ChunkedRule(), "gated delta rule in PyTorch"
    return ChunkedRule(), f"gated delta rule in PyTorch, slowly: {missing}"

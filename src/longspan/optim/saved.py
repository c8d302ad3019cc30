"""The states of an optimizer as checkpoints hold them: in no layout of its own, so that they can be cut anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.optim import low_bit
from longspan.optim.host import HostAdamW, empty_on_host, local

_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Of AdamW, and whether they have a sign."""


def saved_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a parameter's state to be written: 8-bit values as float32, and the scales of this part's blocks beside
    them, so that where the parts are the same again the same bytes come of it.

    Cost: none; values are unpacked by `low_bit.unpacked`, one tensor at a time.
    """
    found = dict(state)
    for key, value in state.items():
        if low_bit.is_packed(local(value)):
            found |= {key: value.to(torch.float32), _scale(key, value): local(value).scale}  # pyright: ignore[reportAttributeAccessIssue]
    return found


def empty_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return a state of AdamW to be read into, named as `saved_state` does.

    Cost: for 8-bit states, 8 bytes per element in host memory.
    """
    if isinstance(optimizer, HostAdamW):
        moments = {name: empty_on_host(parameter) for name in ("master", *_MOMENTS)}
    elif low_bit.packs(optimizer):
        moments = {name: empty_on_host(parameter) for name in _MOMENTS}
        blocks = local(low_bit.buffer(optimizer, parameter, True))
        if low_bit.is_packed(blocks):
            scale: Any = blocks.scale  # pyright: ignore[reportAttributeAccessIssue]
            moments |= {_scale(name, parameter): torch.empty_like(scale) for name in _MOMENTS}
    else:
        moments = {name: torch.zeros_like(parameter.detach()) for name in _MOMENTS}
    return {"step": torch.zeros(()), **moments}


def own_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a state that was read as the optimizer has it."""
    if not low_bit.packs(optimizer):
        return dict(state)
    found = {"step": state["step"]}
    for name, signed in _MOMENTS.items():
        found[name] = low_bit.buffer(optimizer, parameter, signed)
        low_bit.fill(local(found[name]), local(state[name]), state.get(_scale(name, parameter)))
    return found


def _scale(name: str, tensor: Tensor) -> str:
    """Name the scales of a process's part of a state, after which part of how many it is."""
    index, count = 0, 1
    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard():
                index = index * tensor.device_mesh.size(dim) + tensor.device_mesh.get_local_rank(dim)
                count *= tensor.device_mesh.size(dim)
    return f"{name}_scale_{index}of{count}"

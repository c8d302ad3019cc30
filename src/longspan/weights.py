"""Parameters whose elements an engine has divided over processes, and their sizes as if it had not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def under_zero3(parameter: Tensor) -> bool:
    """Whether DeepSpeed holds a parameter: between calls of its module it is empty."""
    return hasattr(parameter, "ds_id")


def sharded(parameter: Tensor) -> bool:
    """Whether this process holds a part of a parameter only."""
    return isinstance(parameter, DTensor) or under_zero3(parameter)


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter when it is whole."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

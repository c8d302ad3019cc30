"""Rows of a matrix that travel to the ranks that want them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from longspan.mesh import Axis


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """Send rows [n, w], sorted by the rank they go to, and return those that come in, sorted by the rank they are from.

    Args:
        sent, received: how many rows go to, and come from, each rank of the axis.

    Cost: one all-to-all of no more than these rows.
    """
    if axis.size == 1:
        return rows
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=axis.group)
    return arrived

"""Rows of a matrix to whoever needs them: each rank sends as many to each other as the plan says."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from longspan.comm.pending import Pending
from longspan.mesh import Axis


def exchange_rows(sent: Tensor, counts: Sequence[int], expected: Sequence[int], axis: Axis) -> Pending[Tensor]:
    """Start sending rows [n, width] to the ranks of an axis while theirs arrive.

    Args:
        sent: the rows for each rank, in rank order; it must stay as it is until the result is taken.
        counts: rows for each rank; expected: rows from each.

    Returns:
        The rows of all ranks, in rank order [sum of expected, width].

    Cost: one all-to-all; every rank of the axis makes it, also if it sends and expects nothing.
    """
    received = sent.new_empty(sum(expected), sent.shape[1])
    request = dist.all_to_all_single(received, sent, list(expected), list(counts), axis.group, async_op=True)
    return Pending([request], lambda: received, sent, axis.waits)

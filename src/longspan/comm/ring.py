"""Point-to-point shifts around the ring, posted early and awaited late."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.pending import Pending
from longspan.mesh import Axis


def shift(tensors: Sequence[Tensor], axis: Axis) -> Pending[list[Tensor]]:
    """Start sending `tensors` to the next rank while the previous rank's arrive, in one message.

    Shapes and dtype are the same on every rank. Cost: one send and one receive of their size, and one copy.
    """
    sent = torch.cat([t.reshape(-1) for t in tensors])
    received = torch.empty_like(sent)
    shapes = [t.shape for t in tensors]
    ops = [
        dist.P2POp(dist.isend, sent, axis.peer(1), axis.group),
        dist.P2POp(dist.irecv, received, axis.peer(-1), axis.group),
    ]

    def finish() -> list[Tensor]:
        parts = received.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    return Pending(dist.batch_isend_irecv(ops), finish, sent)

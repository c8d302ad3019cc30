"""Point-to-point shifts around the ring, posted early and awaited late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.mesh import Axis


@dataclass
class Shift:
    """Tensors on their way from the previous rank of the axis; `wait` returns them."""

    received: Tensor
    shapes: Sequence[torch.Size]
    requests: list[Any]
    sent: Tensor

    def wait(self) -> list[Tensor]:
        """Return the tensors once they are here."""
        for request in self.requests:
            request.wait()
        parts = self.received.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def shift(tensors: Sequence[Tensor], axis: Axis) -> Shift:
    """Start sending `tensors` to the next rank while the previous rank's arrive, in one message.

    Shapes and dtype are the same on every rank. Cost: one send and one receive of their size, and one copy.
    """
    sent = torch.cat([t.reshape(-1) for t in tensors])
    received = torch.empty_like(sent)
    ops = [
        dist.P2POp(dist.isend, sent, axis.peer(1), axis.group),
        dist.P2POp(dist.irecv, received, axis.peer(-1), axis.group),
    ]
    return Shift(received, [t.shape for t in tensors], dist.batch_isend_irecv(ops), sent)

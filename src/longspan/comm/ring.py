"""Point-to-point shifts around the ring, posted early and awaited late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.pending import Pending
from longspan.mesh import Axis


@dataclass(frozen=True)
class Packet:
    """Tensors of one dtype in one buffer, which travels as it is; `tensors` are views of it."""

    buffer: Tensor
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Packet:
        """Pack tensors. Cost: one copy."""
        return cls.over(torch.cat([t.reshape(-1) for t in tensors]), [t.shape for t in tensors])

    @classmethod
    def over(cls, buffer: Tensor, shapes: Sequence[torch.Size]) -> Packet:
        """Return the tensors of these shapes in a flat buffer."""
        parts = buffer.split([shape.numel() for shape in shapes])
        return cls(buffer, tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def shift(packet: Packet, axis: Axis, hop: int = 1) -> Pending[Packet]:
    """Start sending a packet to the rank `hop` further while that of the rank as far back arrives, in one message.

    Shapes and dtype are the same on every rank; what is sent must not change before the result is taken. Cost: one send
    and one receive of its size.
    """
    received = torch.empty_like(packet.buffer)
    ops = [
        dist.P2POp(dist.isend, packet.buffer, axis.peer(hop), axis.group),
        dist.P2POp(dist.irecv, received, axis.peer(-hop), axis.group),
    ]
    shapes = [t.shape for t in packet.tensors]
    return Pending(dist.batch_isend_irecv(ops), lambda: Packet.over(received, shapes), packet, axis.waits)

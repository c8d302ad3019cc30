"""ZigZag ring attention: keys and values travel, queries stay; with one rank it is plain attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longspan.attention.merge import Merged, Sum
from longspan.attention.schedule import Schedule
from longspan.comm.ring import Packet, shift
from longspan.kernels.protocol import Kernel
from longspan.mesh import Axis


@dataclass(frozen=True)
class Ring:
    """Attention over an axis whose ranks hold different keys.

    Backward gives every block the final output and log-sum-exp: with P = exp(S - lse) and delta = rowsum(dout * out)
    of the whole attention, each block's share of dq, dk and dv is exact and no forward is repeated.

    Source: Liu et al., Ring Attention (2023), and the zigzag division of ring-flash-attention.
    """

    kernel: Kernel
    axis: Axis

    def forward(self, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, scale: float) -> tuple[Tensor, Tensor]:
        """Attend from this rank's queries to the keys of all ranks.

        Args:
            q: [B, S/r, H, D]; k: [B, S/r, K, D]; v: [B, S/r, K, Dv].

        Returns:
            out [B, S/r, H, Dv] in q's dtype, lse [B, H, S/r] in fp32 or wider.

        Cost: r - 1 shifts of k and v, each under the compute of one step; one copy, to pack them.
        """
        merged = Merged(q.shape[:-1] + v.shape[-1:], q.dtype)
        packet = self._pack(k, v)
        for step, works in enumerate(schedule.steps):
            coming = shift(packet, self.axis) if packet and step + 1 < self.axis.size else None
            for work in works:
                part = self.kernel.forward(
                    q[work.rows, work.q], k[work.rows, work.k], v[work.rows, work.k], work.block, scale
                )
                (merged.first if step == 0 else merged.add)(work.rows, work.q, *part)
            if coming is not None:
                packet = coming.wait()
                k, v = packet.tensors
        return merged.result()

    def backward(
        self, dout: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], schedule: Schedule, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of this rank's tokens, in fp32 or wider where several blocks were added up.

        Args:
            dout: [B, S/r, H, Dv].
            saved: q, k, v, out and lse of `forward`.

        Cost: r - 1 shifts of k and v, and r shifts of dk and dv in fp32, which follow their keys around the ring, each
            rank adding its share to the packet that it hands on.
        """
        q, k, v, out, lse = saved
        dq, arriving = Sum(q), None
        packet = self._pack(k, v)
        for step, works in enumerate(schedule.steps):
            coming = shift(packet, self.axis) if packet and step + 1 < self.axis.size else None
            dk, dv = Sum(k), Sum(v)
            for work in works:
                rows, tokens = work.rows, work.q
                parts = self.kernel.backward(
                    dout[rows, tokens],
                    q[rows, tokens],
                    k[rows, work.k],
                    v[rows, work.k],
                    out[rows, tokens],
                    lse[rows, :, tokens],
                    work.block,
                    scale,
                )
                dq.add(rows, tokens, parts[0])
                dk.add(rows, work.k, parts[1])
                dv.add(rows, work.k, parts[2])
            if self.axis.size == 1:
                return dq.value(), dk.value(), dv.value()
            if arriving is None:
                gradients = Packet.of([dk.wide(), dv.wide()])
            else:
                gradients = arriving.wait()
                for total, share in zip(gradients.tensors, (dk, dv), strict=True):
                    if works:
                        total += share.value()
            arriving = shift(gradients, self.axis)
            if coming is not None:
                packet = coming.wait()
                k, v = packet.tensors
        assert arriving is not None
        return (dq.value(), *arriving.wait().tensors)  # type: ignore[return-value]

    def _pack(self, k: Tensor, v: Tensor) -> Packet | None:
        return Packet.of([k, v]) if self.axis.size > 1 else None

"""ZigZag ring attention: keys and values travel, queries stay; with one rank it is plain attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from longspan.attention.merge import Merged, Sum
from longspan.attention.schedule import Schedule
from longspan.comm.ring import Packet, shift
from longspan.kernels.protocol import Kernel, Score
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, score: Score) -> tuple[Tensor, Tensor]:
        """Attend from this rank's queries to the keys of all ranks.

        Args:
            q: [B, S/r, H, D]; k: [B, S/r, K, D]; v: [B, S/r, K, Dv].

        Returns:
            out [B, S/r, H, Dv] in q's dtype, lse [B, H, S/r] in fp32 or wider.

        Cost: one shift of k and v for each offset but the first, r - 1 at most, each under the compute of one step; one
            copy, to pack them.
        """
        merged = Merged(q.shape[:-1] + v.shape[-1:], q.dtype)
        packet = self._pack(k, v, schedule)
        for works, hop in zip(schedule.steps, self._hops(schedule), strict=True):
            coming = shift(packet, self.axis, hop) if packet and hop else None
            for work in works:
                part = self.kernel.forward(
                    q[work.rows, work.q], k[work.rows, work.k], v[work.rows, work.k], work.block, score
                )
                merged.take(work, *part)
            if coming is not None:
                packet = coming.wait()
                k, v = packet.tensors
        return merged.result()

    def backward(
        self, dout: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], schedule: Schedule, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of this rank's tokens, in fp32 or wider where several blocks were added up.

        Args:
            dout: [B, S/r, H, Dv].
            saved: q, k, v, out and lse of `forward`.

        Cost: the shifts of k and v as in forward, and as many of dk and dv in fp32, which follow their keys, each rank
            adding its share to the packet that it hands on, and one that takes them home.
        """
        q, k, v, out, lse = saved
        dq, arriving = Sum(q), None
        packet = self._pack(k, v, schedule)
        for works, hop in zip(schedule.steps, self._hops(schedule), strict=True):
            coming = shift(packet, self.axis, hop) if packet and hop else None
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
                    score,
                )
                dq.add(rows, tokens, parts[0])
                dk.add(rows, work.k, parts[1])
                dv.add(rows, work.k, parts[2])
            if packet is None:
                return dq.value(), dk.value(), dv.value()
            if arriving is None:
                gradients = Packet.of([dk.wide(), dv.wide()])
            else:
                gradients = arriving.wait()
                for total, share in zip(gradients.tensors, (dk, dv), strict=True):
                    if works:
                        total += share.value()
            arriving = shift(gradients, self.axis, hop or self.axis.size - schedule.offsets[-1])
            if coming is not None:
                packet = coming.wait()
                k, v = packet.tensors
        assert arriving is not None
        return (dq.value(), *arriving.wait().tensors)  # type: ignore[return-value]

    def _hops(self, schedule: Schedule) -> Iterator[int]:
        """Yield how many ranks on keys go after each step; 0 after the last."""
        yield from (following - offset for offset, following in pairwise(schedule.offsets))
        yield 0

    def _pack(self, k: Tensor, v: Tensor, schedule: Schedule) -> Packet | None:
        return Packet.of([k, v]) if len(schedule.offsets) > 1 else None

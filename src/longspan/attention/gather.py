"""Gather attention: keys that some other rank needs travel once, then each rank attends in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.gathering import Gathering, Indices
from longspan.attention.schedule import Schedule
from longspan.comm.exchange import units
from longspan.comm.pending import Pending
from longspan.comm.rows import exchange_rows
from longspan.errors import BatchError
from longspan.kernels.protocol import Kernel, Score, wide
from longspan.mesh import Axis


@dataclass(frozen=True)
class Gather:
    """Attention over an axis whose ranks hold segments of documents.

    A rank receives the keys and values before each of its segments that it does not hold, and one packed call attends
    from every segment to its document up to the segment's end: nothing is merged. Where much travels, KV heads are
    divided into chunks, and the next chunk travels while one is computed. Backward moves the keys again rather than
    keep them; their gradients go back to the owners in the operands' dtype, one rounding each, and are added up there
    in fp32 or wider.

    Memory beside the operands: keys and values of the kernel call for the heads of a chunk, in backward their gradients
    too, and what travels for two chunks.
    """

    kernel: Kernel
    axis: Axis

    def forward(self, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, score: Score) -> tuple[Tensor, Tensor]:
        """Attend from this rank's queries to all keys that they see.

        Args:
            q: [B, S/r, H, D]; k: [B, S/r, K, D]; v: [B, S/r, K, Dv].

        Returns:
            out [B, S/r, H, Dv] in q's dtype, lse [B, H, S/r] in fp32 or wider.

        Cost: per chunk of heads one all-to-all of the keys and values that are needed elsewhere, and one copy of all
            keys and values on a rank that needs any; none of it where no rank needs any.
        """
        walk = _Walk.over(self, schedule, q, k, v)
        q = _flat(q)
        if len(walk.spans) == 1:
            out, lse = self.kernel.forward(q, *next(walk.operands()), walk.plan.block, score)
        else:
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
            lse = q.new_empty(1, q.shape[2], q.shape[1], dtype=wide(q.dtype))
            operands = walk.operands()
            for heads in walk.queries:
                part = self.kernel.forward(q[:, :, heads], *next(operands), walk.plan.block, score)
                out[:, :, heads], lse[:, heads] = part
        rows = k.shape[:2]
        return out.view(*rows, *out.shape[2:]), lse[0].unflatten(1, rows).transpose(0, 1)

    def backward(
        self, dout: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], schedule: Schedule, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of this rank's tokens, in the operands' dtype or wider.

        Args:
            dout: [B, S/r, H, Dv].
            saved: q, k, v, out and lse of `forward`.

        Cost: per chunk of heads the all-to-all of `forward`, and one back of the same size.
        """
        q, k, v, out, lse = saved
        walk = _Walk.over(self, schedule, q, k, v)
        rows = k.shape[:2]
        q, dout, out, lse = _flat(q), _flat(dout), _flat(out), lse.transpose(0, 1).flatten(1)[None]
        grads: list[tuple[Tensor, ...]] = []
        returning: Pending[tuple[Tensor, Tensor]] | None = None
        operands = walk.operands()
        for heads in walk.queries:
            keys, values = next(operands)
            final = (out[:, :, heads], lse[:, heads])
            dq, dkeys, dvalues = self.kernel.backward(
                dout[:, :, heads], q[:, :, heads], keys, values, *final, walk.plan.block, score
            )
            del keys, values  # zip would hold them while the next chunk's are laid out
            if returning is not None:
                grads[-1] = (grads[-1][0], *returning.wait())
            returning = walk.send_back(dkeys, dvalues)
            del dkeys, dvalues
            grads.append((dq,))
        assert returning is not None
        grads[-1] = (grads[-1][0], *returning.wait())
        dq, dk, dv = (parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in zip(*grads, strict=True))
        return tuple(grad.view(*rows, *grad.shape[2:]) for grad in (dq, dk, dv))  # type: ignore[return-value]


@dataclass(frozen=True)
class _Walk:
    """One pass over the chunks of heads.

    Args:
        k: [n, K, D]; v: [n, K, Dv]: this rank's tokens of all rows.
        spans: KV heads of each chunk; `queries`: the query heads that read them.
    """

    axis: Axis
    plan: Gathering
    at: Indices
    k: Tensor
    v: Tensor
    spans: Sequence[slice]
    queries: Sequence[slice]

    @classmethod
    def over(cls, gather: Gather, schedule: Schedule, q: Tensor, k: Tensor, v: Tensor) -> _Walk:
        plan = schedule.gathering
        assert plan is not None
        if plan.rows != q.shape[0]:
            raise BatchError(f"The schedule was made for {plan.rows} rows, attention was given {q.shape[0]}.")
        spans, share = plan.spans(k.shape[2]), q.shape[2] // k.shape[2]
        queries = [slice(span.start * share, span.stop * share) for span in spans]
        return cls(gather.axis, plan, plan.on(k.device), _flat(k)[0], _flat(v)[0], spans, queries)

    def operands(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the kernel's keys and values of each chunk [1, N, heads, ...], the next chunk being on its way."""
        coming = self._send(self.spans[0])
        for number, span in enumerate(self.spans):
            received = None if coming is None else coming.wait()
            coming = self._send(self.spans[number + 1]) if number + 1 < len(self.spans) else None
            k, v = self.k[:, span], self.v[:, span]
            if received is None or not self.plan.repacks:
                yield k[None], v[None]
                continue
            width = k.shape[1] * k.shape[2]
            parts = received.split([width, received.shape[1] - width], 1)
            keys, values = (part.unflatten(1, t.shape[1:]) for t, part in zip((k, v), parts, strict=True))
            yield self._laid_out(k, keys), self._laid_out(v, values)

    def send_back(self, dkeys: Tensor, dvalues: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Return the gradients of a chunk's keys to their owners -> dk, dv [1, n, heads, ...] of this rank's tokens.

        Args:
            dkeys: [1, N, heads, D]; dvalues: [1, N, heads, Dv].
        """
        if not self.plan.moves:
            return Pending([], lambda: (dkeys, dvalues))
        own = [_taken(t, self.at.own) if self.plan.repacks else t for t in (dkeys[0], dvalues[0])]
        shapes, dtype = [t.shape[1:] for t in own], wide(self.k.dtype)
        widths = [shape.numel() for shape in shapes]
        lent = torch.zeros(sum(self.plan.receives), sum(widths), dtype=dtype, device=dkeys.device)
        for at, source in self.at.filled:
            part = torch.cat([_taken(t[0], at).flatten(1) for t in (dkeys, dvalues)], 1)
            lent.index_add_(0, source, part.to(dtype))
        back = exchange_rows(lent.to(self.k.dtype), self.plan.receives, self.plan.sends, self.axis)

        def finish(returned: Tensor) -> tuple[Tensor, Tensor]:
            total = torch.cat([_taken(t, self.at.shared).flatten(1) for t in own], 1).to(dtype)
            for slots, part in zip(self.at.slots, returned.split(self.plan.sends), strict=True):
                total.index_add_(0, slots, part.to(dtype))
            for t, shape, part in zip(own, shapes, total.split(widths, 1), strict=True):
                t.index_copy_(0, self.at.shared, part.unflatten(1, shape).to(t.dtype))
            return own[0][None], own[1][None]

        return back.then(finish)

    def _send(self, span: slice) -> Pending[Tensor] | None:
        """Start sending the keys and values of a chunk of heads that others need; None if nobody needs any."""
        if not self.plan.moves:
            return None
        rows = torch.cat([_taken(t[:, span], self.at.sent).flatten(1) for t in (self.k, self.v)], 1)
        return exchange_rows(rows, self.plan.sends, self.plan.receives, self.axis)

    def _laid_out(self, own: Tensor, received: Tensor) -> Tensor:
        """Return the kernel's keys or values [1, N, heads, D] from own [n, heads, D] and received ones."""
        laid = own.new_empty(self.plan.keys, *own.shape[1:])
        into, source = units(laid, own)
        into.index_copy_(0, self.at.own, source)
        for at, chosen in self.at.filled:
            laid.index_copy_(0, at, _taken(received, chosen))
        return laid[None]


def _flat(t: Tensor) -> Tensor:
    """Lay rows one after the other: [B, s, ...] -> [1, B * s, ...]."""
    return t.reshape(1, -1, *t.shape[2:])


def _taken(t: Tensor, index: Tensor) -> Tensor:
    """Return rows of t [n, ...], copied in large units."""
    (source,) = units(t)
    return source.index_select(0, index).view(t.dtype)

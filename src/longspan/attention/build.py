"""The composition: attention as a differentiable function of this rank's q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.gather import Gather
from longspan.attention.ring import Ring
from longspan.attention.schedule import Schedule
from longspan.attention.sinks import absorb_, sinks_gradient
from longspan.attention.ulysses import Ulysses
from longspan.comm.heads import HeadSplit
from longspan.errors import BatchError, ConfigError, TopologyError
from longspan.kernels.protocol import Kernel, Request, Score
from longspan.kernels.select import pick
from longspan.layout import Layout, Piece
from longspan.mask import Mask
from longspan.mesh import Mesh


@dataclass(frozen=True)
class Attend:
    """Sequence-parallel attention over a mesh: `ulysses(exchange(kernel))`."""

    mesh: Mesh
    kernel: Kernel

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, score: Score, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from this rank's tokens to all tokens that they may see.

        Args:
            q: [B, S/sp, H, D]; k: [B, S/sp, K, D]; v: [B, S/sp, K, Dv]: this rank's shard of the layout that
                `schedule` was made for.
            score: what becomes of q k^T before the softmax.
            sinks: [H] scores that take a share of each head's softmax, all of them on every rank. Each rank gets its
                share of their gradient, that of the heads and tokens that it worked on.

        Returns:
            [B, S/sp, H, Dv], q's dtype, differentiable once.

        Cost: forward one all-to-all of q, k, v and one of out, backward one of dout and one of dq, dk, dv, each once
            per interleaved part; and what the exchange of keys moves.
        """
        return _Attention.apply(q, k, v, sinks, self, schedule, score)  # type: ignore[no-any-return]

    def ulysses(self, q: Tensor, k: Tensor, parts: tuple[Piece, ...] = ()) -> Ulysses:
        """Return the head exchange for operands with these head counts; `parts` as in `Ulysses`."""
        return Ulysses(HeadSplit(q.shape[2], k.shape[2], self.mesh.ulysses.size), self.mesh.ulysses, parts)

    def exchange(self, schedule: Schedule) -> Ring | Gather:
        """Return the exchange of keys that a schedule was made for."""
        return (Ring if schedule.gathering is None else Gather)(self.kernel, self.mesh.ring)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    mesh: Mesh | None,
    *,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    kernel: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute exact causal attention over a sequence divided over a mesh, for models that are not Hugging Face's.

    Args:
        q: [B, S/sp, H, D]; k: [B, S/sp, K, D]; v: [B, S/sp, K, Dv]: this rank's shard of `layout`.
        mask: who sees whom, its window included; its length is the padded row length S.
        mesh: the axes, from `longspan.make_mesh` or `handle.mesh`; None for one rank, which holds whole rows.
        layout: how rows were divided; None stands for `Layout(mask.length, ring, ulysses)`.
        schedule: `Schedule.of(mask, layout, mesh.ring.rank)`, made once for all layers of a micro-batch and in place of
            `layout`; None makes one for this call, for a ring.
        kernel: `auto`, one of longspan's kernels, or a Hugging Face attention name.
        scale: factor on q k^T; None for D ** -0.5.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: [H], the same on every rank: scores that take a share of each head's softmax. Each rank gets its share of
            their gradient, to be added up over the ranks of the sequence.

    Returns:
        [B, S/sp, H, Dv], differentiable once.

    Raises:
        ConfigError: a mesh of torch's.
        KernelError: no kernel, or not the named one, can do this on this device.
        BatchError: operands, mask and layout do not fit together.
        TopologyError: the layout is for another mesh, or a rank would be left without a query head.
    """
    mesh = Mesh(device_type=q.device.type) if mesh is None else _checked_mesh(mesh)
    if layout is None:
        layout = schedule.layout if schedule else Layout(mask.length, mesh.ring.size, mesh.ulysses.size)
    _check_operands(q, k, v, mask, layout, mesh)
    if schedule is None:
        schedule = Schedule.of(mask, layout, mesh.ring.rank)
    elif (schedule.mask, schedule.layout, schedule.ring_rank) != (mask, layout, mesh.ring.rank):
        raise BatchError(
            f"The schedule was made for another mask, layout or rank: rows of {schedule.layout.length} tokens and ring "
            f"rank {schedule.ring_rank}, here {layout.length} and {mesh.ring.rank}. Make it with "
            "Schedule.of(mask, layout, mesh.ring.rank)."
        )
    if sinks is not None and (sinks.shape != q.shape[2:3] or sinks.device != q.device):
        raise BatchError(
            f"sinks hold one score per query head, [{q.shape[2]}] on {q.device}; got {list(sinks.shape)} on "
            f"{sinks.device}."
        )
    gathers = schedule.gathering is not None
    demands = {"varlen": mask.packed or gathers, "window": mask.window is not None, "softcap": softcap is not None}
    request = Request(q.device, q.dtype, q.shape[-1], v.shape[-1], bottom_right=gathers, **demands)
    score = Score(q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    return Attend(mesh, pick(kernel, request))(q, k, v, schedule, score, sinks)


def _checked_mesh(mesh: Any) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise ConfigError(
            f"attend takes a mesh of longspan's, got {type(mesh).__name__}: make it once, before training, with "
            "longspan.make_mesh(sequence_parallel_size, heads=..., kv_heads=..., mesh=a DeviceMesh or None)."
        )
    return mesh


def _check_operands(q: Tensor, k: Tensor, v: Tensor, mask: Mask, layout: Layout, mesh: Mesh) -> None:
    """Refuse operands of which some token would be left out, or never written."""
    if (layout.ring, layout.ulysses) != (mesh.ring.size, mesh.ulysses.size):
        raise TopologyError(
            f"The layout divides rows over ring {layout.ring} x ulysses {layout.ulysses}, the mesh has "
            f"{mesh.ring.size} x {mesh.ulysses.size}."
        )
    rows = q.shape[0] if mask.documents is None else len(mask.documents)
    shapes = [tuple(t.shape) for t in (q, k, v)]
    fits = all(len(shape) == 4 and shape[:2] == (rows, layout.shard_tokens) for shape in shapes)
    if not fits or k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3]:
        raise BatchError(
            f"attend takes q [B, s, H, D], k [B, s, K, D] and v [B, s, K, Dv] with B = {rows} rows and s = "
            f"{layout.shard_tokens} tokens, this rank's shard of {layout.length}; got {shapes[0]}, {shapes[1]} and "
            f"{shapes[2]}."
        )
    if len({t.dtype for t in (q, k, v)}) > 1 or len({t.device for t in (q, k, v)}) > 1:
        told = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        raise BatchError(f"attend takes q, k and v of one dtype on one device, got {told}.")


class _Attention(torch.autograd.Function):
    """Keeps what the kernel saw (q, k, v of this rank's heads, out, lse), so backward exchanges gradients only."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        attend: Attend,
        schedule: Schedule,
        score: Score,
    ) -> Tensor:
        ulysses, exchange = attend.ulysses(q, k, schedule.parts), attend.exchange(schedule)
        q, k, v = ulysses.enter(q, k, v).wait()
        out, lse = exchange.forward(q, ulysses.expand(k), ulysses.expand(v), schedule, score)
        if sinks is not None:
            lse = absorb_(out, lse, ulysses.own(sinks))
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.ulysses, ctx.exchange, ctx.schedule, ctx.score = ulysses, exchange, schedule, score
        return ulysses.leave(out).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        ulysses: Ulysses = ctx.ulysses
        (dout,) = ulysses.enter_queries(dout.to(out.dtype)).wait()
        saved = (q, ulysses.expand(k), ulysses.expand(v), out, lse)
        dq, dk, dv = ctx.exchange.backward(dout, saved, ctx.schedule, ctx.score)
        d_sinks = None
        if sinks is not None:
            d_sinks = ulysses.share(sinks_gradient(dout, out, lse, ulysses.own(sinks))).to(sinks.dtype)
        grads = (dq, ulysses.contract(dk), ulysses.contract(dv))
        dq, dk, dv = ulysses.leave_gradients(*(g.to(q.dtype) for g in grads)).wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None

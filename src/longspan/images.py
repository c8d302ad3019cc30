"""Which rank looks at which images, and how their features get to the tokens that stand for them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.batch import cut
from longspan.comm.rows import exchange_rows
from longspan.layout import Layout
from longspan.mesh import Axis


@dataclass(frozen=True)
class Frames:
    """Images and single frames of videos, whose patches attend among themselves alone, in the order of their patches.

    Args:
        grids: [n, 2] patches of each along height and width, on the host.
        merge: patches along height, and along width, that make one feature row.
    """

    grids: Tensor
    merge: int

    @classmethod
    def of(cls, grids: Sequence[Tensor], merge: int) -> Frames:
        """Take images and videos [n, 3] of (frames, height, width) apart."""
        whole = torch.cat([torch.empty(0, 3, dtype=torch.long), *grids])
        return cls(whole[:, 1:].repeat_interleave(whole[:, 0], 0), merge)

    @property
    def patches(self) -> Tensor:
        """Patches of each frame, [n]."""
        return self.grids.prod(1)

    @property
    def rows(self) -> Tensor:
        """Feature rows of each frame, [n]."""
        return self.patches // self.merge**2

    def divide(self, ranks: int) -> list[list[int]]:
        """Divide frames over ranks by their patches, the largest first, each to the rank that has least so far."""
        patches = self.patches.tolist()
        loads = [(0, rank) for rank in range(ranks)]
        shares: list[list[int]] = [[] for _ in loads]
        for frame in sorted(range(len(patches)), key=lambda i: -patches[i]):
            load, rank = loads[0]
            shares[rank].append(frame)
            heapq.heapreplace(loads, (load + patches[frame], rank))
        return [sorted(share) for share in shares]


@dataclass(frozen=True)
class Route:
    """The way of feature rows from the ranks that compute them to the tokens that stand for them.

    Each row stands for one token, so it travels once, and its gradient back: nothing is added up on the way.

    Args:
        rows: of all images of the batch.
        frames: those that this rank looks at.
        images: how many of the rows that this rank's tokens want are of images; they come before those of videos.
        send: which of this rank's rows travel, in the order of the ranks they go to.
        sent, received: how many rows go to, and come from, each rank.
        order: where each row that this rank's tokens want is among the received ones.
    """

    rows: int
    frames: tuple[int, ...]
    images: int
    send: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor

    @classmethod
    def of(cls, places: Tensor, images: int, frames: Frames, layout: Layout, rank: int) -> Route:
        """Work out a rank's route, on the host.

        Args:
            places: [B, S] feature row that each token stands for, those of images before those of videos; -1 for text.
            images: rows of images.
            frames: what the rows are features of.
        """
        shares, counts = frames.divide(layout.size), frames.rows
        owner, start = torch.zeros_like(counts), torch.zeros_like(counts)
        for who, share in enumerate(shares):
            owner[share] = who
            start[share] = counts[share].cumsum(0) - counts[share]
        total = int(counts.sum())
        owners = owner.repeat_interleave(counts)
        offsets = torch.arange(total) + (start - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        wanted = [_wanted(cut(places, layout, who, -1), images) for who in range(layout.size)]
        send = [offsets[rows[owners[rows] == rank]] for rows in wanted]
        sources = owners[wanted[rank]]
        return cls(
            rows=total,
            frames=tuple(shares[rank]),
            images=int((wanted[rank] < images).sum()),
            send=torch.cat(send),
            sent=tuple(map(len, send)),
            received=tuple(torch.bincount(sources, minlength=layout.size).tolist()),
            order=sources.argsort(stable=True).argsort(),
        )

    def deliver(self, features: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
        """Bring the features of this rank's frames [n, w] to the tokens that want them, differentiably.

        Returns:
            [m, w] the rows of this rank's tokens, in their order, row by row of the batch; and a 0-d zero. Whatever the
            rows are used for, what is differentiated must depend on the zero, on all ranks: backward exchanges again.

        Cost: one all-to-all over the axis, if the batch has images, and one in backward.
        """
        return _Deliver.apply(features, self, axis)  # type: ignore[return-value]


def _wanted(places: Tensor, images: int) -> Tensor:
    """Return the feature rows that a rank's tokens [B, s] stand for: those of images, then those of videos."""
    image = (places >= 0) & (places < images)
    return torch.cat([places[image], places[places >= images]])


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, route: Route, axis: Axis) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.axis, ctx.shape = route, axis, features.shape
        send, order = (t.to(features.device, non_blocking=True) for t in (route.send, route.order))
        ctx.save_for_backward(send, order)
        rows = features[send]
        if route.rows and axis.size > 1:
            rows = exchange_rows(rows, route.sent, route.received, axis).wait()
        return rows[order], features.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        route: Route = ctx.route
        send, order = ctx.saved_tensors
        arrived = d_rows.new_empty(d_rows.shape)
        arrived[order] = d_rows
        if route.rows and ctx.axis.size > 1:
            arrived = exchange_rows(arrived, route.received, route.sent, ctx.axis).wait()
        d_features = d_rows.new_zeros(ctx.shape)
        d_features[send] = arrived
        return d_features, None, None


class Tie(torch.autograd.Function):
    """Hands a tensor on, and lets its gradient reach a 0-d zero as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, zero: Tensor) -> Tensor:
        ctx.zero = zero.detach()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return dx, torch.zeros_like(ctx.zero)

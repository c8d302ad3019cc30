"""The composition: a recurrence over a sequence divided over ranks, as a differentiable function of own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.comm.regroup import Regroup
from longspan.kernels.protocol import wide
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Axis
from longspan.recurrent.call import DeltaNet, Recurrence
from longspan.recurrent.conv import causal_conv
from longspan.recurrent.rule import Operands, Rule
from longspan.recurrent.stretch import Stretch
from longspan.tiling import first_order, private_graph


@dataclass(frozen=True)
class Share:
    """What one rank works on of the recurrences of a micro-batch, with so many key heads."""

    regroup: Regroup
    stretch: Stretch
    relays: bool  # some document goes on from one stretch to the next

    @classmethod
    def of(
        cls, mask: Mask, rows: int, layout: Layout, axis: Axis, heads: int, halo: int, device: torch.device
    ) -> Share:
        """Divide the rows over the ranks of an axis. Pure; cost as `Stretch.of`."""
        regroup = Regroup(layout, axis, heads, halo)
        cuts = [regroup.piece(number).start for number in range(1, regroup.stretches)]
        documents = mask.documents or ((0,),)
        relays = any(cut not in starts for starts in documents for cut in cuts)
        return cls(regroup, Stretch.of(mask, rows, regroup.piece(regroup.stretch), halo, device), relays)


@dataclass(frozen=True)
class Recurrent:
    """Gated delta nets over sequences divided over ranks: convolution and recurrence of some heads on each rank.

    Heads are independent of each other, channels of the convolution too: with heads enough for all ranks each has whole
    rows of some heads, whatever the layout. Beyond that ranks with the same heads have consecutive stretches of them;
    what a stretch makes of any state is an affine map of it, so all work at once, exchange their maps, and each folds
    those before it into the state that it begins with.

    Source: head exchange as in DeepSpeed-Ulysses (2023); maps of states as in flash-linear-attention's context
    parallelism, divided over heads besides.
    """

    rule: Rule

    def __call__(self, call: Recurrence, share: Share) -> Tensor:
        """Mix this rank's tokens with all that precede them in their documents -> [B, s, V, Dv], differentiable once.

        Cost: forward one all-to-all there and one back, backward two more and the forward's work once more; where
            documents go on from one stretch to the next, one of their states in forward and two in backward.
        """
        return _Recurrent.apply(call.tokens, *call.weights, self, call.net, share)  # type: ignore[no-any-return]

    def enter(self, tokens: Tensor, share: Share) -> Tensor:
        """Exchange tokens [B, s, K, features] for those of this rank's stretch and heads."""
        return share.regroup.to_stretch(tokens, halo=True)

    def forward(self, net: DeltaNet, tokens: Tensor, weights: Sequence[Tensor], share: Share) -> Tensor:
        """Return out [B, s, V, Dv] of this rank's shard.

        Args:
            tokens: what `enter` returned.
            weights: as in `Recurrence`.
        """
        with torch.no_grad(), _own_dtypes(tokens):
            operands = _operands(net, tokens, _of(share, weights), share.stretch)
            state = None
            if share.relays:
                state = _folded(share.regroup.states_before(self._transition(operands, share)), operands)
            out = self.rule.outputs(operands, share.stretch, state)
            return share.regroup.to_shard(_by_key_head(out, net)).flatten(2).unflatten(2, (-1, net.v_head_dim))

    def backward(
        self, net: DeltaNet, dout: Tensor, tokens: Tensor, weights: Sequence[Tensor], share: Share
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of this rank's shard of tokens, and of the weights: this rank's part of their sum.

        Args:
            dout: [B, s, V, Dv]; the rest as in `forward`.
        """
        dout = share.regroup.to_stretch(_by_key_head(dout, net)).flatten(2).unflatten(2, (-1, net.v_head_dim))
        with private_graph(()), _own_dtypes(tokens):
            leaves = [t.detach().requires_grad_() for t in (tokens, *_of(share, weights))]
            operands = _operands(net, leaves[0], leaves[1:], share.stretch)
            before: list[Tensor] = []
            if share.relays:
                transition = self._transition(operands, share)
                before = [t.requires_grad_() for t in share.regroup.states_before(transition.detach())]
            out = self.rule.outputs(operands, share.stretch, _folded(before, operands))
            grads = list(torch.autograd.grad(out, [*leaves, *before], dout, retain_graph=share.relays))
            if share.relays:
                d_transition = share.regroup.states_after(grads[len(leaves) :], transition)
                if transition.requires_grad:
                    more = torch.autograd.grad(transition, leaves, d_transition)
                    grads = [a + b for a, b in zip(grads, more, strict=False)]
        whole = [torch.zeros_like(weight) for weight in weights]
        for part, grad in zip(_of(share, whole), grads[1 : len(leaves)], strict=True):
            part.copy_(grad)
        return share.regroup.to_shard(grads[0], halo=True), whole

    def _transition(self, operands: Operands, share: Share) -> Tensor:
        """Return what this rank's stretch makes of a state; nobody asks that of the last one."""
        if share.regroup.stretch < share.regroup.stretches - 1:
            return self.rule.transition(operands, share.stretch)
        (batch, _, heads, dv), width = operands.v.shape, operands.k.shape[-1]
        return torch.zeros(batch, heads, width, dv + width, dtype=wide(operands.v.dtype), device=operands.v.device)


class _Recurrent(torch.autograd.Function):
    """Keeps the tokens that it worked on, and works them out again in backward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *args: Any) -> Tensor:
        *weights, recurrent, net, share = args
        tokens = recurrent.enter(tokens, share)
        ctx.save_for_backward(tokens, *weights)
        ctx.recurrent, ctx.net, ctx.share = recurrent, net, share
        return recurrent.forward(net, tokens, weights, share)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        tokens, *weights = ctx.saved_tensors
        dtokens, dweights = ctx.recurrent.backward(ctx.net, dout, tokens, weights, ctx.share)
        return dtokens, *dweights, None, None, None


def _operands(net: DeltaNet, tokens: Tensor, weights: Sequence[Tensor], stretch: Stretch) -> Operands:
    """Convolve the channels, and make decay and beta of the other features."""
    conv, a_log, dt_bias = weights
    mixed = causal_conv(tokens[..., : net.channels].flatten(2), conv.flatten(0, 1), stretch.numbers, stretch.halo)
    q, k, v = (
        net.activation(mixed)
        .unflatten(2, (-1, net.channels))
        .split([net.head_dim, net.head_dim, net.share * net.v_head_dim], -1)
    )
    beta, a = tokens[:, stretch.halo :, :, net.channels :].to(wide(tokens.dtype)).split(net.share, -1)
    g = -a_log.to(a.dtype).exp() * F.softplus(a + dt_bias.to(a.dtype))
    v = v.flatten(2).unflatten(2, (-1, net.v_head_dim))
    return Operands(q, k, v, g.flatten(2), beta.sigmoid().flatten(2))


def _of(share: Share, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of weights that belongs to this rank's heads."""
    run = share.regroup.run(share.regroup.axis.rank)
    return [weight[run.start : run.stop] for weight in weights]


def _by_key_head(t: Tensor, net: DeltaNet) -> Tensor:
    """[B, T, V, Dv] -> [B, T, K, share * Dv]."""
    return t.unflatten(2, (-1, net.share)).flatten(3)


def _folded(transitions: Sequence[Tensor], operands: Operands) -> Tensor | None:
    """Return the state that earlier stretches leave, the first of which began with none."""
    state = None
    for transition in transitions:
        left, through = transition.split([operands.v.shape[-1], operands.k.shape[-1]], -1)
        state = left if state is None else through @ state + left
    return state


def _own_dtypes(t: Tensor) -> torch.autocast:
    """Compute in the dtypes that operands have: what is worked out again does so without autocast."""
    return torch.autocast(t.device.type, enabled=False)

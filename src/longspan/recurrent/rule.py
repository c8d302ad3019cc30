"""The gated delta rule in PyTorch: token by token, and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.kernels.protocol import wide
from longspan.recurrent.stretch import Stretch

_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Operands:
    """What the rule works on: q, k [B, T, K, Dk], v [B, T, V, Dv], g and beta [B, T, V], g at most 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def beside_unit(self) -> tuple[Operands, Tensor]:
        """Return the operands and the state [B, V, Dk, Dv + Dk] that show what becomes of any state.

        The state is 0 beside the unit matrix, and the values are 0 for the latter: what is left in its place is the
        product of all that the tokens do to a state.
        """
        (batch, _, heads, _), width = self.v.shape, self.k.shape[-1]
        unit = torch.eye(width, dtype=wide(self.v.dtype), device=self.v.device)
        state = F.pad(unit, (self.v.shape[-1], 0)).expand(batch, heads, width, -1)
        return Operands(self.k, self.k, F.pad(self.v, (0, width)), self.g, self.beta), state


class Rule(Protocol):
    """The gated delta rule over the documents of a stretch, differentiable.

    With S [Dk, Dv] the state of a value head, 0 before a document, for each of its tokens::

        S = exp(g) S;  S = S + k (beta (v - k^T S));  out = S^T q / sqrt(Dk)

    q and k are divided by their norm first; consecutive value heads share a key head. States are fp32 or wider.

    Source: Yang et al., Gated Delta Networks (2024).

    Args:
        held_bytes: what forward and backward hold at most, per number of the operands.
    """

    name: str
    held_bytes: int

    def outputs(self, operands: Operands, stretch: Stretch, state: Tensor | None) -> Tensor:
        """Return out [B, T, V, Dv], in v's dtype.

        Args:
            state: [B, V, Dk, Dv] at the beginning, for rows whose first document began before; None for zeros.
        """
        ...

    def transition(self, operands: Operands, stretch: Stretch) -> Tensor:
        """Return what the stretch makes of a state: E beside M, [B, V, Dk, Dv + Dk], so that S becomes M S + E.

        That is the state of the document it ends in; where this began inside, M is 0.
        """
        ...


class ReferenceRule:
    """Token by token: slow and plain, to compare with."""

    name = "reference"
    held_bytes = 2000  # a state per token

    def outputs(self, operands: Operands, stretch: Stretch, state: Tensor | None) -> Tensor:
        """See `Rule.outputs`."""
        return self._walk(operands, stretch, state)[0]

    def transition(self, operands: Operands, stretch: Stretch) -> Tensor:
        """See `Rule.transition`."""
        beside, unit = operands.beside_unit()
        return self._walk(beside, stretch, unit)[1]

    def _walk(self, operands: Operands, stretch: Stretch, state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = _prepared(operands)
        if state is None:
            state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
        document, outs = stretch.entering, []
        for t in range(v.shape[2]):
            goes_on = stretch.own[:, t] == document
            state = torch.where(goes_on[:, None, None, None], state, 0.0) * g[:, :, t, None, None].exp()
            read = torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
            change = beta[:, :, t, None] * (v[:, :, t] - read)
            state = state + k[:, :, t, :, None] * change[:, :, None, :]
            outs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
            document = stretch.own[:, t]
        return torch.stack(outs, 1).to(operands.v.dtype), state


class ChunkedRule:
    """Chunks of 64 tokens: inside one all tokens at once, from one to the next a state.

    A document that begins inside a chunk is a matter of masks: tokens see those of their own document alone, and the
    incoming state if it is theirs; the state that leaves holds the document that the chunk ends in.

    Cost: O(T) products of [64, D] matrices, T / 64 of them one after the other.
    Source: the UT transform of Yang et al., Parallelizing Linear Transformers with the Delta Rule (2024).
    """

    name = "torch"
    held_bytes = 46  # in fp32, counted on a CPU

    def outputs(self, operands: Operands, stretch: Stretch, state: Tensor | None) -> Tensor:
        """See `Rule.outputs`."""
        chunks = _Chunks.of(operands, stretch)
        outs, _ = chunks.scan(state)
        return outs[:, :, : operands.v.shape[1]].transpose(1, 2).to(operands.v.dtype)

    def transition(self, operands: Operands, stretch: Stretch) -> Tensor:
        """See `Rule.transition`."""
        beside, unit = operands.beside_unit()
        return _Chunks.of(beside, stretch).scan(unit)[1]


@dataclass(frozen=True)
class _Chunks:
    """Chunks [B, V, N, C, ...] of C tokens, with everything but the state worked out.

    A chunk changes its values by the state it gets: values - erased S, of which `within` makes outputs and `written`
    the state that leaves.
    """

    queries: Tensor  # [..., C, Dk]
    within: Tensor  # [..., C, C]
    values: Tensor  # [..., C, Dv]
    erased: Tensor  # [..., C, Dk]
    written: Tensor  # [..., C, Dk]
    kept: Tensor  # [...]

    @classmethod
    def of(cls, operands: Operands, stretch: Stretch) -> _Chunks:
        q, k, v, g, beta = (_cut(t) for t in _prepared(operands))
        numbers = stretch.own
        missing = -numbers.shape[1] % _CHUNK_TOKENS
        numbers = torch.cat([numbers, numbers[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, _CHUNK_TOKENS))
        last = numbers[:, :, -1]
        before = torch.cat([stretch.entering[:, None], last[:, :-1]], 1)
        numbers, last, before = numbers[:, None], last[:, None, :, None], before[:, None, :, None]  # [B, 1, N, C or 1]
        same = (numbers[..., :, None] == numbers[..., None, :]).tril()
        # decays add up within a document: what comes before it must not move it, not even by a rounding
        sums = (g[..., None, :] * same).sum(-1)
        decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(~same, -torch.inf).exp()
        since = sums.exp() * (numbers == before)
        until = (sums[..., -1:] - sums).masked_fill(numbers != last, -torch.inf).exp()
        system = (beta[..., None] * k) @ k.mT * decay
        wanted = torch.cat([v, k * since[..., None]], -1) * beta[..., None]
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        values, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
        kept = sums[..., -1].exp() * (last == before)[..., 0]
        return cls(q * since[..., None], q @ k.mT * decay, values, erased, k * until[..., None], kept)

    def scan(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Go from chunk to chunk -> outputs [B, V, N * C, Dv], and the last state."""
        now: Tensor = (
            self.values.new_zeros(*self.values.shape[:2], self.erased.shape[-1], self.values.shape[-1])
            if state is None
            else state
        )
        outs = []
        # not chunk by index, whose backward would make zeros of all chunks for each
        parts = (self.queries, self.within, self.values, self.erased, self.written, self.kept)
        for queries, within, values, erased, written, kept in zip(*(t.unbind(2) for t in parts), strict=True):
            changed = values - erased @ now
            outs.append(queries @ now + within @ changed)
            now = now * kept[..., None, None] + written.mT @ changed
        return torch.cat(outs, 2), now


def _prepared(operands: Operands) -> tuple[Tensor, ...]:
    """Return q, k, v [B, V, T, D], g and beta [B, V, T], in fp32 or wider, q and k normalised, per value head."""
    dtype = wide(operands.v.dtype)
    q, k = (_normalised(t.to(dtype)) for t in (operands.q, operands.k))
    share = operands.v.shape[2] // k.shape[2]
    q, k = (t.repeat_interleave(share, 2).transpose(1, 2) for t in (q * q.shape[-1] ** -0.5, k))
    v, g, beta = (t.to(dtype).transpose(1, 2) for t in (operands.v, operands.g, operands.beta))
    return q, k, v, g, beta


def _normalised(t: Tensor) -> Tensor:
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)


def _cut(t: Tensor) -> Tensor:
    """Cut [B, V, T, ...] into chunks, the last one filled up with tokens that change nothing."""
    missing = -t.shape[2] % _CHUNK_TOKENS
    t = F.pad(t, (0,) * (2 * (t.dim() - 3)) + (0, missing))
    return t.unflatten(2, (-1, _CHUNK_TOKENS))

"""PyTorch's flash attention for CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.kernels.merge import merge_
from longspan.kernels.protocol import Request, Score, check, segments, wide
from longspan.mask import Block

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_CHUNK_TOKENS = 128
"""Queries of one call with a window; each computes so many scores more than it needs."""


class Cpu:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, with what it lacks built from calls it can do.

    Its causal mask is top-left aligned. Where there are more keys than queries, the keys before the first query's own
    are one call without a mask, the rest one square causal call, joined by their log-sum-exps; given the final ones,
    backward needs no join. A window is a loop over some queries each, with a mask for the keys that one of them sees.
    Packed documents are a loop over segments.

    Source: `aten/src/ATen/native/transformers/attention.cpp` of PyTorch. Without keys the operator ends the process,
    and it gives a row that sees no key a log-sum-exp of 0; `check` and `segments` let neither reach it.
    """

    name = "cpu"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this kernel cannot run on a device, or None."""
        return None if device.type == "cpu" else f"it runs on CPUs, not on {device.type}"

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        if why := self.missing(request.device):
            return why
        if request.dtype not in _DTYPES:
            return f"it computes in fp64, fp32, bf16 and fp16, not {request.dtype}"
        if request.v_head_dim != request.head_dim:
            return f"queries and values must have one head_dim, not {request.head_dim} and {request.v_head_dim}"
        return "it does not cap scores" if request.softcap else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check(self, q, k, v, block, score)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [B, Sq, H, D]
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype))  # [B, H, Sq]
        for at, keys in segments(block, q.shape[1], k.shape[1]):
            out[:, at], lse[:, :, at] = _forward(q[:, at], k[:, keys], v[:, keys], block, score.scale)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; dq is fp32 or wider, dk and dv have the operands' dtype."""
        check(self, q, k, v, block, score)
        dq = q.new_empty(q.shape, dtype=wide(q.dtype))
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        for at, keys in segments(block, q.shape[1], k.shape[1]):
            final = (dout[:, at], out[:, at], lse[:, :, at])
            dq[:, at], dk[:, keys], dv[:, keys] = _backward(final, q[:, at], k[:, keys], v[:, keys], block, score.scale)
        return dq, dk, dv


def _forward(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Attend within one segment: out [B, Sq, H, D], lse [B, H, Sq]."""
    before = k.shape[1] - q.shape[1]
    if _restricts(block, k):
        parts = [
            _flash(q[:, at], k[:, keys], v[:, keys], False, scale, seen) for at, keys, seen in _chunks(q, k, block)
        ]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)
    if not block.causal or before == 0:
        return _flash(q, k, v, block.causal, scale)
    out, lse = _flash(q, k[:, :before], v[:, :before], False, scale)
    merged = out.to(wide(out.dtype))
    merge_(merged, lse, *_flash(q, k[:, before:], v[:, before:], True, scale))
    return merged.to(q.dtype), lse


def _backward(
    final: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one segment from its (dout, out, lse)."""
    before = k.shape[1] - q.shape[1]
    if _restricts(block, k):
        return _window_backward(final, q, k, v, block, scale)
    if not block.causal or before == 0:
        return _flash_backward(final, q, k, v, block.causal, scale)
    dq, dk, dv = _flash_backward(final, q, k[:, :before], v[:, :before], False, scale)
    dq_own, dk_own, dv_own = _flash_backward(final, q, k[:, before:], v[:, before:], True, scale)
    return dq.to(wide(dq.dtype)) + dq_own, torch.cat((dk, dk_own), 1), torch.cat((dv, dv_own), 1)


def _window_backward(
    final: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one segment with a window; a key's are added up over the chunks that see it."""
    dout, out, lse = final
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=wide(x.dtype)) for x in (k, v))
    for at, keys, seen in _chunks(q, k, block):
        part = (dout[:, at], out[:, at], lse[:, :, at])
        dq[:, at], dk_part, dv_part = _flash_backward(part, q[:, at], k[:, keys], v[:, keys], False, scale, seen)
        dk[:, keys] += dk_part
        dv[:, keys] += dv_part
    return dq, dk, dv


def _restricts(block: Block, k: Tensor) -> bool:
    """Whether some query of a segment does not see its first key."""
    return block.left is not None and block.left < k.shape[1] - 1


def _chunks(q: Tensor, k: Tensor, block: Block) -> Iterator[tuple[slice, slice, Tensor]]:
    """Cut queries, yielding for each chunk its tokens, the keys that it sees, and a mask to be added to the scores."""
    queries, keys = q.shape[1], k.shape[1]
    assert block.left is not None
    for start in range(0, queries, _CHUNK_TOKENS):
        stop = min(start + _CHUNK_TOKENS, queries)
        first = max(0, start + keys - queries - block.left)
        last = stop + keys - queries if block.causal else keys
        at = torch.arange(start, stop)[:, None] + keys - queries
        other = torch.arange(first, last)
        hidden = other < at - block.left
        if block.causal:
            hidden |= other > at
        yield slice(start, stop), slice(first, last), q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    operands = (x.transpose(1, 2) for x in (q, k, v))  # the operator wants [B, H, S, D]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out.transpose(1, 2), lse


def _flash_backward(
    final: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, out, lse = final
    dout_t, q_t, k_t, v_t, out_t = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout_t, q_t, k_t, v_t, out_t, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

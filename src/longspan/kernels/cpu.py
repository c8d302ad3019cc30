"""PyTorch's flash attention for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.merge import merge_
from longspan.kernels.protocol import Request, check, segments, wide
from longspan.mask import Block

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Cpu:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, with what it lacks built from calls it can do.

    Its causal mask is top-left aligned. Where there are more keys than queries, the keys before the first query's own
    are one call without a mask, the rest one square causal call, joined by their log-sum-exps; given the final ones,
    backward needs no join. Packed documents are a loop over segments.

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
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check(self, q, k, v, block)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # [B, Sq, H, D]
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=wide(q.dtype))  # [B, H, Sq]
        for at, keys in segments(block, q.shape[1], k.shape[1]):
            out[:, at], lse[:, :, at] = _forward(q[:, at], k[:, keys], v[:, keys], block.causal, scale)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; dq is fp32 or wider, dk and dv have the operands' dtype."""
        check(self, q, k, v, block)
        dq = q.new_empty(q.shape, dtype=wide(q.dtype))
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        for at, keys in segments(block, q.shape[1], k.shape[1]):
            final = (dout[:, at], out[:, at], lse[:, :, at])
            dq[:, at], dk[:, keys], dv[:, keys] = _backward(
                final, q[:, at], k[:, keys], v[:, keys], block.causal, scale
            )
        return dq, dk, dv


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend within one segment: out [B, Sq, H, D], lse [B, H, Sq]."""
    before = k.shape[1] - q.shape[1]
    if not causal or before == 0:
        return _flash(q, k, v, causal, scale)
    out, lse = _flash(q, k[:, :before], v[:, :before], False, scale)
    merged = out.to(wide(out.dtype))
    merge_(merged, lse, *_flash(q, k[:, before:], v[:, before:], True, scale))
    return merged.to(q.dtype), lse


def _backward(
    final: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one segment from its (dout, out, lse)."""
    before = k.shape[1] - q.shape[1]
    if not causal or before == 0:
        return _flash_backward(final, q, k, v, causal, scale)
    dq, dk, dv = _flash_backward(final, q, k[:, :before], v[:, :before], False, scale)
    dq_own, dk_own, dv_own = _flash_backward(final, q, k[:, before:], v[:, before:], True, scale)
    return dq.to(wide(dq.dtype)) + dq_own, torch.cat((dk, dk_own), 1), torch.cat((dv, dv_own), 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    operands = (x.transpose(1, 2) for x in (q, k, v))  # the operator wants [B, H, S, D]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*operands, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse


def _flash_backward(
    final: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dout, out, lse = final
    dout_t, q_t, k_t, v_t, out_t = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout_t, q_t, k_t, v_t, out_t, lse, 0.0, causal, scale=scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

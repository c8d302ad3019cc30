"""FlashAttention-2 as PyTorch ships it, dense and packed."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.cuda import device_problem, operand_problem
from longspan.kernels.protocol import Request, borders, check
from longspan.mask import Block


class AtenFlash:
    """`aten::_flash_attention_forward` and `_backward`: needs no package, causal is bottom-right aligned.

    Source: `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp` of PyTorch: head_dim a multiple of 8 up
    to 256; log-sum-exp [B, H, S] dense and [H, T] packed, read as contiguous; the random state is read only when there
    is dropout.
    """

    name = "aten-flash"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this kernel cannot run on a device, or None."""
        if why := device_problem(device):
            return why
        if not torch.backends.cuda.is_flash_attention_available():
            return "this build of PyTorch has no flash attention"
        return None

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        return self.missing(request.device) or operand_problem(request, largest_head_dim=256)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check(self, q, k, v, block)
        call = torch.ops.aten._flash_attention_forward
        if not block.varlen:
            out, lse, *_ = call(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, block.causal, False, scale=scale)
            return out, lse
        cu_q, cu_k, max_q, max_k = borders(q, k, block)
        out, lse, *_ = call(q[0], k[0], v[0], cu_q, cu_k, max_q, max_k, 0.0, block.causal, False, scale=scale)
        return out[None], lse[None]  # [T, H, D] -> [1, T, H, D], [H, T] -> [1, H, T]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the gradients have the operands' dtype."""
        check(self, q, k, v, block)
        call = torch.ops.aten._flash_attention_backward
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # unread: no dropout
        operands = (dout, q, k, v, out, lse.contiguous())
        if not block.varlen:
            dq, dk, dv = call(
                *operands, None, None, q.shape[1], k.shape[1], 0.0, block.causal, state, state, scale=scale
            )
            return dq, dk, dv
        cu_q, cu_k, max_q, max_k = borders(q, k, block)
        row = (x[0] for x in operands)
        dq, dk, dv = call(*row, cu_q, cu_k, max_q, max_k, 0.0, block.causal, state, state, scale=scale)
        return dq[None], dk[None], dv[None]

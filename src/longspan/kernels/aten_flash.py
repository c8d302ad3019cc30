"""FlashAttention-2 as PyTorch ships it, dense and packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.kernels.cuda import device_problem, operand_problem
from longspan.kernels.protocol import Request, Score, borders, check
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
        if why := self.missing(request.device) or operand_problem(request, largest_head_dim=256):
            return why
        return "it does not cap scores" if request.softcap else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check(self, q, k, v, block, score)
        call, options = torch.ops.aten._flash_attention_forward, {"scale": score.scale, **_window(block)}
        if not block.varlen:
            out, lse, *_ = call(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, block.causal, False, **options)
            return out, lse
        cu_q, cu_k, max_q, max_k = borders(q, k, block)
        out, lse, *_ = call(q[0], k[0], v[0], cu_q, cu_k, max_q, max_k, 0.0, block.causal, False, **options)
        return out[None], lse[None]  # [T, H, D] -> [1, T, H, D], [H, T] -> [1, H, T]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the gradients have the operands' dtype."""
        check(self, q, k, v, block, score)
        call, options = torch.ops.aten._flash_attention_backward, {"scale": score.scale, **_window(block)}
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # unread: no dropout
        operands = (dout, q, k, v, out, lse.contiguous())
        if not block.varlen:
            dq, dk, dv = call(*operands, None, None, q.shape[1], k.shape[1], 0.0, block.causal, state, state, **options)
            return dq, dk, dv
        cu_q, cu_k, max_q, max_k = borders(q, k, block)
        row = (x[0] for x in operands)
        dq, dk, dv = call(*row, cu_q, cu_k, max_q, max_k, 0.0, block.causal, state, state, **options)
        return dq[None], dk[None], dv[None]


def _window(block: Block) -> dict[str, Any]:
    """Return a window in the operator's terms; -1 is no bound, and causal order is one to the right of its own."""
    return (
        {} if block.left is None else {"window_size_left": block.left, "window_size_right": 0 if block.causal else -1}
    )

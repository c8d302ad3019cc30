"""cuDNN's attention as PyTorch ships it: the fastest without a package, for dense calls."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.cuda import device_problem, operand_problem
from longspan.kernels.protocol import Request, Score, check
from longspan.mask import Block


class Cudnn:
    """`aten::_scaled_dot_product_cudnn_attention` and its backward.

    Only calls whose meaning every cuDNN version agrees on: without a mask, or causal with as many keys as queries.
    Packed calls would build a new graph each time. Calls of one token failed or hung with cuDNN 9.19 on an H200.

    Source: `aten/src/ATen/native/cudnn/MHA.cpp` of PyTorch: backward up to head_dim 128; the log-sum-exp is
    [B, H, S, 1]; dout must have out's strides; seed and offset are read only when there is dropout.
    """

    name = "cudnn"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this kernel cannot run on a device, or None."""
        if why := device_problem(device):
            return why
        if not torch.backends.cudnn.is_available():
            return "this build of PyTorch has no cuDNN"
        return None

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        if why := self.missing(request.device) or operand_problem(request, largest_head_dim=128):
            return why
        if request.varlen:
            return "it does not take packed documents"
        if request.bottom_right:
            return "it is causal only with as many keys as queries"
        if request.window:
            return "it does not take windows"
        if request.softcap:
            return "it does not cap scores"
        if request.single:
            return "with one query or key it fails or does not return"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`.

        Cost: the first call of each shape builds a graph, tens to hundreds of milliseconds on the host.
        """
        check(self, q, k, v, block, score)
        operands = (x.transpose(1, 2) for x in (q, k, v))  # the operator wants [B, H, S, D]
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *operands, None, True, 0.0, block.causal, False, scale=score.scale
        )
        return out.transpose(1, 2), lse.squeeze(-1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the gradients have the operands' dtype."""
        check(self, q, k, v, block, score)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        operands = (x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out.contiguous()))
        stats = lse.contiguous().unsqueeze(-1)  # [B, H, Sq, 1]
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *operands, stats, seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, block.causal, scale=score.scale
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

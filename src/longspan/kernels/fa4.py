"""FlashAttention-4 (`flash-attn-4`), called below its autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.kernels.cuda import device_problem, import_problem, load, operand_problem
from longspan.kernels.flash_attn import packed_lengths
from longspan.kernels.protocol import Request, check
from longspan.mask import Block

_MODULE, _PACKAGE = "flash_attn.cute.interface", "flash-attn-4"


class FlashAttention4:
    """`_flash_attn_fwd` and `_flash_attn_bwd` of `flash_attn.cute.interface`.

    Releases differ in how many tensors they return after out and lse, and dq, dk and dv, so only these are taken. A
    tensor as longest segment would compile anew each step, hence integers; a strided dout indexes with 32 bits, hence
    a contiguous one. Its backward with grouped heads needs one head_dim for queries and values.

    Source: flash-attn-4 4.0.0b36: forward from compute capability 8.0, backward from 9.0.
    """

    name = "fa4"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this kernel cannot run on a device, or None."""
        return device_problem(device, oldest=(9, 0)) or import_problem(_MODULE, _PACKAGE)

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        return self.missing(request.device) or operand_problem(request, largest_head_dim=256)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`.

        Cost: the first call of each head_dim, mask kind and head ratio compiles, seconds on the host.
        """
        check(self, q, k, v, block)
        call = load(_MODULE, _PACKAGE)._flash_attn_fwd
        common = {"softmax_scale": scale, "causal": block.causal, "return_lse": True}
        if not block.varlen:
            out, lse = call(q=q, k=k, v=v, **common)[:2]
            return out, lse
        out, lse = call(q=q[0], k=k[0], v=v[0], **common, **packed_lengths(q, k, block))[:2]
        return out[None], lse[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the gradients have the operands' dtype."""
        check(self, q, k, v, block)
        call = load(_MODULE, _PACKAGE)._flash_attn_bwd
        common = {
            "softmax_scale": scale,
            "causal": block.causal,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        operands = {"q": q, "k": k, "v": v, "out": out, "dout": dout.contiguous(), "lse": lse.contiguous()}
        if not block.varlen:
            dq, dk, dv = call(**operands, **common)[:3]
            return dq, dk, dv
        row = {name: x[0] for name, x in operands.items()}
        dq, dk, dv = call(**row, **common, **packed_lengths(q, k, block))[:3]
        return dq[None], dk[None], dv[None]

"""FlashAttention-4 (`flash-attn-4`), called below its autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.kernels.cuda import device_problem, import_problem, load, operand_problem
from longspan.kernels.flash_attn import packed_lengths
from longspan.kernels.protocol import Request, Score, check
from longspan.mask import Block

_MODULE, _PACKAGE = "flash_attn.cute.interface", "flash-attn-4"


class FlashAttention4:
    """`_flash_attn_fwd` and `_flash_attn_bwd` of `flash_attn.cute.interface`.

    Releases differ in how many tensors they return after out and lse, and dq, dk and dv, so only these are taken. A
    tensor as longest segment would compile anew each step, hence integers; a strided dout indexes with 32 bits, hence
    a contiguous one. Its backward with grouped heads needs one head_dim for queries and values.

    Source: flash-attn-4 4.0.0b36: forward from compute capability 8.0, backward from 9.0; windows and softcaps in both,
    but for a softcap in the backward of head_dim 256 from compute capability 10.0 on.
    """

    name = "fa4"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this kernel cannot run on a device, or None."""
        return device_problem(device, oldest=(9, 0)) or import_problem(_MODULE, _PACKAGE)

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        if why := self.missing(request.device) or operand_problem(request, largest_head_dim=256):
            return why
        if request.softcap and request.head_dim == 256 and device_problem(request.device, oldest=(10, 0)) is None:
            return "on this device it does not cap scores of head_dim 256"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`.

        Cost: the first call of each head_dim, mask kind and head ratio compiles, seconds on the host.
        """
        check(self, q, k, v, block, score)
        call = load(_MODULE, _PACKAGE)._flash_attn_fwd
        common = {"return_lse": True} | _options(block, score)
        if not block.varlen:
            out, lse = call(q=q, k=k, v=v, **common)[:2]
            return out, lse
        out, lse = call(q=q[0], k=k[0], v=v[0], **common, **packed_lengths(q, k, block))[:2]
        return out[None], lse[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the gradients have the operands' dtype."""
        check(self, q, k, v, block, score)
        call = load(_MODULE, _PACKAGE)._flash_attn_bwd
        common = {"deterministic": torch.are_deterministic_algorithms_enabled()} | _options(block, score)
        operands = {"q": q, "k": k, "v": v, "out": out, "dout": dout.contiguous(), "lse": lse.contiguous()}
        if not block.varlen:
            dq, dk, dv = call(**operands, **common)[:3]
            return dq, dk, dv
        row = {name: x[0] for name, x in operands.items()}
        dq, dk, dv = call(**row, **common, **packed_lengths(q, k, block))[:3]
        return dq[None], dk[None], dv[None]


def _options(block: Block, score: Score) -> dict[str, Any]:
    """Return what forward and backward are both told."""
    options: dict[str, Any] = {"softmax_scale": score.scale, "causal": block.causal}
    if score.softcap is not None:
        options["softcap"] = score.softcap
    if block.left is not None:
        options |= {"window_size_left": block.left, "window_size_right": 0 if block.causal else None}
    return options

"""FlashAttention-2 and -3 as packages, called below their autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.kernels.cuda import device_problem, import_problem, load, operand_problem
from longspan.kernels.protocol import Request, Score, borders, check
from longspan.mask import Block

_FA2, _FA2_PACKAGE = "flash_attn.flash_attn_interface", "flash-attn"
_FA3, _FA3_PACKAGE = "flash_attn_interface", "flash-attn-3 (hopper build of flash-attention)"


class FlashAttention2:
    """`_flash_attn_forward`, `_flash_attn_varlen_forward` and their backwards; causal is bottom-right aligned.

    Source: flash-attn 2.7 to 2.8.3: out and lse come first, and backward writes into dq, dk and dv.
    """

    name = "fa2"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this kernel cannot run on a device, or None."""
        return device_problem(device) or import_problem(_FA2, _FA2_PACKAGE)

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        return self.missing(request.device) or operand_problem(request, largest_head_dim=256)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check(self, q, k, v, block, score)
        module = load(_FA2, _FA2_PACKAGE)
        common = _fa2_options(block, score) | {"return_softmax": False}
        if not block.varlen:
            out, lse = module._flash_attn_forward(q, k, v, **common)[:2]
            return out, lse
        lengths = packed_lengths(q, k, block)
        out, lse = module._flash_attn_varlen_forward(q[0], k[0], v[0], **lengths, **common)[:2]
        return out[None], lse[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the gradients have the operands' dtype."""
        check(self, q, k, v, block, score)
        module = load(_FA2, _FA2_PACKAGE)
        common = _fa2_options(block, score) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        operands = [dout.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), *grads]
        if block.varlen:
            row = [x[0] for x in operands]
            module._flash_attn_varlen_backward(*row, **packed_lengths(q, k, block), **common)
        else:
            module._flash_attn_backward(*operands, **common)
        return grads[0], grads[1], grads[2]


class FlashAttention3:
    """`_flash_attn_forward` and `_flash_attn_backward` of `flash_attn_interface`, dense and packed in one.

    Source: `hopper/flash_attn_interface.py` of flash-attention since its calls are custom operators.
    """

    name = "fa3"

    @staticmethod
    def missing(device: torch.device) -> str | None:
        """Say why this kernel cannot run on a device, or None."""
        return device_problem(device) or import_problem(_FA3, _FA3_PACKAGE)

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be served, or None."""
        return self.missing(request.device) or operand_problem(request, largest_head_dim=256)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check(self, q, k, v, block, score)
        call = load(_FA3, _FA3_PACKAGE)._flash_attn_forward
        common = {"causal": block.causal} | _fa_options(block, score)
        if not block.varlen:
            out, lse = call(q, k, v, **common)[:2]
            return out, lse
        out, lse = call(q[0], k[0], v[0], **common, **packed_lengths(q, k, block))[:2]
        return out[None], lse[None]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`; the gradients have the operands' dtype."""
        check(self, q, k, v, block, score)
        call = load(_FA3, _FA3_PACKAGE)._flash_attn_backward
        common = {"is_causal": block.causal, "deterministic": torch.are_deterministic_algorithms_enabled()}
        common |= _fa_options(block, score)
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        operands = [dout.contiguous(), q, k, v, out.contiguous(), lse.contiguous()]
        if block.varlen:
            operands, written = [x[0] for x in operands], [x[0] for x in grads]
            common |= packed_lengths(q, k, block)
        else:
            written = grads
        call(*operands, **common, dq=written[0], dk=written[1], dv=written[2])
        return grads[0], grads[1], grads[2]


def _fa2_options(block: Block, score: Score) -> dict[str, Any]:
    return {"dropout_p": 0.0, "causal": block.causal, "alibi_slopes": None} | _fa_options(block, score)


def _fa_options(block: Block, score: Score) -> dict[str, Any]:
    """Return a call's scores and window under the names of both packages: -1 is no bound, 0.0 no softcap."""
    left, right = (-1, -1) if block.left is None else (block.left, 0 if block.causal else -1)
    window = {"window_size_left": left, "window_size_right": right}
    return {"softmax_scale": score.scale, "softcap": score.softcap or 0.0} | window


def packed_lengths(q: Tensor, k: Tensor, block: Block) -> dict[str, Any]:
    """Return the borders of a packed call under the names that all FlashAttention packages use."""
    cu_q, cu_k, max_q, max_k = borders(q, k, block)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}

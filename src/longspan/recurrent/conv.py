"""The causal convolution of each channel by itself, that begins anew with every document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.kernels.protocol import wide

_BLOCK_TOKENS = 8192
"""Tokens whose products are in fp32 at a time."""


def causal_conv(x: Tensor, weight: Tensor, numbers: Tensor, halo: int = 0) -> Tensor:
    """Convolve tokens with those before them in their document.

    Args:
        x: [B, T, C]; weight: [C, W], whose last column meets the token itself.
        numbers: [B, T] document of each token.
        halo: first tokens of x that others need and for which nothing is returned.

    Returns:
        [B, T - halo, C] in x's dtype, from sums in fp32 or wider; differentiable once. Only operands are kept.
    """
    return _CausalConv.apply(x, weight, numbers, halo)  # type: ignore[no-any-return]


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, numbers: Tensor, halo: int) -> Tensor:
        ctx.save_for_backward(x, weight, numbers)
        ctx.halo = halo
        batch, tokens, channels = x.shape
        out = x.new_empty(batch, tokens - halo, channels)
        for start, stop in _blocks(halo, tokens):
            total = torch.zeros(batch, stop - start, channels, dtype=wide(x.dtype), device=x.device)
            for back, tap in _taps(weight, x):
                first = max(start, back)
                if first < stop:
                    total[:, first - start :] += _before(x, numbers, first, stop, back) * tap
            out[:, start - halo : stop - halo] = total
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, numbers = ctx.saved_tensors
        halo, tokens = ctx.halo, x.shape[1]
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=wide(x.dtype))
        for start, stop in _blocks(0, tokens):
            total = torch.zeros_like(x[:, start:stop], dtype=wide(x.dtype))
            for back, tap in _taps(weight, x):
                first, last = max(start, halo - back), min(stop, tokens - back)
                if first < last:
                    same = numbers[:, first:last] == numbers[:, first + back : last + back]
                    coming = dout[:, first + back - halo : last + back - halo].to(total.dtype) * same[..., None]
                    total[:, first - start : last - start] += coming * tap
                    dweight[:, -1 - back] += (coming * x[:, first:last]).sum((0, 1))
            dx[:, start:stop] = total
        return dx, dweight.to(weight.dtype), None, None


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((a, min(a + _BLOCK_TOKENS, stop)) for a in range(start, stop, _BLOCK_TOKENS))


def _taps(weight: Tensor, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield how many tokens back each column of the weight meets, and the column."""
    width = weight.shape[1]
    return ((back, weight[:, width - 1 - back].to(wide(x.dtype))) for back in range(width))


def _before(x: Tensor, numbers: Tensor, start: int, stop: int, back: int) -> Tensor:
    """Return the tokens that stand `back` before tokens `start` to `stop`, 0 where they are of another document."""
    same = numbers[:, start - back : stop - back] == numbers[:, start:stop]
    return x[:, start - back : stop - back].to(wide(x.dtype)) * same[..., None]

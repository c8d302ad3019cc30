"""A layer's call of its recurrent mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeltaNet:
    """The form of a gated delta net.

    Args:
        heads: key heads, each of which `share` value heads use.
        width: tokens that its convolution sees.
        activation: of what is convolved.
    """

    heads: int
    share: int
    head_dim: int
    v_head_dim: int
    width: int
    activation: Callable[[Tensor], Tensor]

    @property
    def channels(self) -> int:
        """Channels of the convolution per key head: its q, its k and the values that use it."""
        return 2 * self.head_dim + self.share * self.v_head_dim


@dataclass(frozen=True)
class Recurrence:
    """One call of a gated delta net, with all that belongs to a key head side by side, before the convolution.

    Args:
        tokens: [B, S, K, channels + 2 share]: channels, then what beta and the decay of each value head are made of.
        weights: of the convolution [K, channels, W]; A_log and dt_bias [K, share].
    """

    net: DeltaNet
    tokens: Tensor
    weights: tuple[Tensor, Tensor, Tensor]

    @property
    def form(self) -> DeltaNet:
        """What is no tensor of it."""
        return self.net

    def tensors(self, wanted: str) -> tuple[Tensor, ...]:
        """Return all tensors."""
        return self.operands()

    def differentiable(self) -> tuple[Tensor, ...]:
        """Return the operands."""
        return self.operands()

    def operands(self) -> tuple[Tensor, ...]:
        """Return what has a gradient: tokens, then weights."""
        return (self.tokens, *self.weights)

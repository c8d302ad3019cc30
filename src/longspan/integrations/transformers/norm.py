"""The norm between the last layer and the head, in tiles: its float32 copies of a shard would outweigh a layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.integrations.transformers.lending import lent
from longspan.keep import Memory
from longspan.mlp import stands_alone
from longspan.tiled import tile

if TYPE_CHECKING:
    from longspan.integrations.transformers.applied import Applied

_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm", "embedding_norm")
"""What trunks call it."""

_TOKENS = 5


def final_norm(owner: nn.Module, embedding: Tensor, device: torch.device) -> nn.Module | None:
    """Find the norm that follows the layers, by name.

    Args:
        owner: the module that holds the list of layers.
        embedding: [V, d], as wide as hidden states, and of their type.
        device: where the model is, or will be if it is on the meta device.

    Returns:
        None if there is none under a known name that turns each token into one token, whatever the others are. It then
        runs as it is, with more memory and the same result.
    """
    for name in _NAMES:
        module = getattr(owner, name, None)
        if not isinstance(module, nn.Module):
            continue
        x = torch.randn(1, _TOKENS, embedding.shape[-1], generator=torch.Generator().manual_seed(7))
        try:
            with lent(module.modules(), device):
                good = stands_alone(module, module.forward, x.to(device, embedding.dtype))
        except Exception:  # it takes something else
            good = False
        if good:
            return module
    return None


def norm_note(norm: nn.Module | None, memory: Memory) -> tuple[str, ...]:
    """Return what a plan has to say about the norm: nothing where it runs as the layers do."""
    if norm is not None or not memory.streams:
        return ()
    return ("the norm after the layers has no known name and runs whole",)


class NormForward:
    """Stands in for the `forward` of the final norm: keeps its input alone, whatever it computes in between."""

    def __init__(self, applied: Applied, module: nn.Module) -> None:
        self.applied, self.module = applied, module
        self.original = module.forward
        functools.update_wrapper(self, self.original)

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = self.applied.call
        if call is None or not call.memory.streams or args or kwargs:
            return self.original(hidden, *args, **kwargs)
        parameters, tokens = list(self.module.parameters()), call.memory.tile_tokens
        return tile(self.original, hidden, parameters=parameters, tile_tokens=tokens, dim=-2)

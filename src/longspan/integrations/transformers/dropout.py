"""Random numbers of a forward pass whose tokens are divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from longspan.mesh import Axis
from longspan.tiling import Ambient


class OwnDraws:
    """Let the ranks of a sequence, which may share a seed, drop different elements of their different tokens.

    Where dropout is at work, a forward pass draws from generators that are seeded from the caller's and the rank. The
    caller's generator of the device moves by one number, on all ranks alike; without dropout none is touched.

    Args:
        sequence: the ranks that share a sequence.
    """

    def __init__(self, model: nn.Module, sequence: Axis, device: torch.device) -> None:
        self.model, self.sequence, self.device = model, sequence, device
        self.dropouts = [module for module in model.modules() if isinstance(module, _DropoutNd)]

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Surround a forward pass. Cost: the generators' states, read and written on the host; no sync."""
        if self.sequence.size == 1 or not any(module.training and module.p > 0 for module in self.dropouts):
            yield
            return
        here = Ambient.capture(self.device, rng=True).reseeded(self.sequence.rank)
        torch.empty((), device=self.device).uniform_()  # so that the next pass draws others
        with here.restored():
            yield

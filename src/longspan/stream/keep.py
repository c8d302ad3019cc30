"""What a layer keeps from forward to backward."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Keep(str, Enum):
    """From the most memory and least work to the least memory and most work.

    graph: the plain layer with all its activations; nothing is computed again.
    x_o_kv: hidden states, attention output and keys and values; the layer runs once more, its attention does not.
    x_o: hidden states and attention output; keys and values are projected again.
    x: hidden states; attention's forward runs again too.
    """

    GRAPH = "graph"
    X_O_KV = "x+O+KV"
    X_O = "x+O"
    X = "x"


@dataclass(frozen=True)
class Memory:
    """How the layers of a model run.

    Args:
        tile_tokens: tokens of a rank per tile; None for one tile.
        keep: one decision for all layers, or one per layer.
    """

    tile_tokens: int | None = None
    keep: Keep | tuple[Keep, ...] = Keep.GRAPH

    def of(self, layer: int) -> Keep:
        """Return what a layer keeps."""
        return self.keep if isinstance(self.keep, Keep) else self.keep[layer]

    @property
    def streams(self) -> bool:
        """Whether some layer runs in tiles."""
        return self.keep != Keep.GRAPH

"""What a ring rank has to compute at each step, worked out once per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.errors import BatchError
from longspan.layout import Layout, Piece
from longspan.mask import Mask, Work


@dataclass(frozen=True)
class Schedule:
    """Kernel calls of one ring rank: `steps[s]` are those on the keys that started out on rank `ring_rank - s`.

    Step 0 covers each query token in exactly one call, as every token sees itself. `parts` are the ranges of a shard
    that Ulysses ranks hold interleaved. `mask`, `layout` and `ring_rank` are what it was made for.
    """

    mask: Mask
    layout: Layout
    ring_rank: int
    steps: tuple[tuple[Work, ...], ...]
    parts: tuple[Piece, ...]

    @classmethod
    def of(cls, mask: Mask, layout: Layout, ring_rank: int) -> Schedule:
        """Work out the steps. Cost: O(documents of the row + ring degree x log), pure.

        Raises:
            BatchError: mask and layout describe rows of different lengths.
        """
        if mask.length != layout.length:
            raise BatchError(f"The mask describes rows of {mask.length} tokens, the layout {layout.length}.")
        mine = layout.ring_pieces(ring_rank)
        steps = tuple(
            mask.work(mine, layout.ring_pieces((ring_rank - step) % layout.ring)) for step in range(layout.ring)
        )
        return cls(mask, layout, ring_rank, steps, layout.tiles())

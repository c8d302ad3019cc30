"""What a ring rank has to compute at each step, worked out once per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.attention.gathering import Gathering
from longspan.errors import BatchError
from longspan.layout import Layout, Piece
from longspan.mask import Mask, Work


@dataclass(frozen=True)
class Schedule:
    """Kernel calls of one ring rank: `steps[s]` are those on the keys that started out on rank `ring_rank - s`.

    Step 0 covers each query token in exactly one call, as every token sees itself. Where keys are gathered, there are
    no steps but a `gathering`. `parts` are the ranges of a shard that Ulysses ranks hold interleaved. `mask`, `layout`
    and `ring_rank` are what it was made for.
    """

    mask: Mask
    layout: Layout
    ring_rank: int
    steps: tuple[tuple[Work, ...], ...]
    parts: tuple[Piece, ...]
    gathering: Gathering | None = None

    @classmethod
    def of(
        cls,
        mask: Mask,
        layout: Layout,
        ring_rank: int,
        exchange: Literal["ring", "gather"] = "ring",
        rows: int = 1,
    ) -> Schedule:
        """Work out the steps. Cost: O(documents of the row + ring degree x log), pure.

        Args:
            exchange: how keys come to the queries of other ranks; every rank of the ring must say the same.
            rows: of the batch, where keys are gathered and `mask` does not list documents.

        Raises:
            BatchError: mask and layout describe rows of different lengths.
        """
        if mask.length != layout.length:
            raise BatchError(f"The mask describes rows of {mask.length} tokens, the layout {layout.length}.")
        if exchange == "gather":
            gathering = Gathering.of(mask, layout, ring_rank, rows)
            return cls(mask, layout, ring_rank, (), layout.tiles(), gathering)
        mine = layout.ring_pieces(ring_rank)
        steps = tuple(
            mask.work(mine, layout.ring_pieces((ring_rank - step) % layout.ring)) for step in range(layout.ring)
        )
        return cls(mask, layout, ring_rank, steps, layout.tiles())

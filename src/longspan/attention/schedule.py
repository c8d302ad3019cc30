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
    """Kernel calls of one ring rank: `steps[i]` are those on the keys of rank `ring_rank - offsets[i]`.

    Offsets are those at which some rank has work, the same on all; keys travel from one to the next. The first is 0, as
    every token sees itself. Where keys are gathered, there are no steps but a `gathering`. `parts` are the ranges of a
    shard that Ulysses ranks hold interleaved. `mask`, `layout` and `ring_rank` are what it was made for.
    """

    mask: Mask
    layout: Layout
    ring_rank: int
    steps: tuple[tuple[Work, ...], ...]
    offsets: tuple[int, ...]
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
        """Work out the steps. Cost: O(documents of the row + squared ring degree x log), pure.

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
            return cls(mask, layout, ring_rank, (), (), layout.tiles(), gathering)
        mine, offsets = layout.ring_pieces(ring_rank), _offsets(mask, layout)
        steps = tuple(mask.work(mine, layout.ring_pieces((ring_rank - offset) % layout.ring)) for offset in offsets)
        return cls(mask, layout, ring_rank, steps, offsets, layout.tiles())


def _offsets(mask: Mask, layout: Layout) -> tuple[int, ...]:
    """Return by how many ranks keys must travel until every query that sees them has met them, ascending."""
    held = sorted(
        ((piece, rank) for rank in range(layout.ring) for piece in layout.ring_pieces(rank)),
        key=lambda pair: pair[0].start,
    )
    found = {0}
    for last in range(len(held) - 1, 0, -1):  # what sees most comes first: mostly it settles the matter
        queries, rank = held[last]
        for keys, owner in reversed(held[:last]):
            if len(found) == layout.ring or not mask.meets(queries, keys):
                break  # what lies before keys that nobody sees is not seen either
            found.add((rank - owner) % layout.ring)
    return tuple(sorted(found))

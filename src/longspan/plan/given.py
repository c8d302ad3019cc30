"""What the plan says of a memory setting that was given, not chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from longspan.keep import Keep, Memory
from longspan.plan.memory import MOVING_BYTES, Ledger
from longspan.plan.runs import Costs, Run
from longspan.plan.setup import Setup
from longspan.plan.solve import Choice, Room, choice_of


def given(setup: Setup, memory: Memory) -> Choice | None:
    """Return the choice of a memory setting, whether it fits or not.

    Returns:
        None for decisions in an order that the plan would not take: layers that keep their graph below others.
    """
    runs = _runs(memory, len(setup.shape.layers))
    if runs is None:
        return None
    setup = replace(setup, tile_tokens=memory.tile_tokens, compiled=memory.compile is not None)
    costs = Costs(setup)
    room = Room(math.inf, (math.inf,) * costs.count, memory.budget)
    moving = 0 if memory.budget.gpu_bytes is None else memory.budget.moving_bytes or MOVING_BYTES
    return choice_of(costs, Ledger(setup, moving), room, *runs)


def _runs(memory: Memory, count: int) -> tuple[tuple[Run, ...], int] | None:
    """Return runs of layers that share what the first kept, and the graphs on top of them."""
    keeps = (memory.keep,) * count if isinstance(memory.keep, Keep) else memory.keep
    rebuilt = (memory.rebuilt,) * count if isinstance(memory.rebuilt, Keep) else memory.rebuilt
    graphs = next((i for i, keep in enumerate(reversed(keeps)) if keep is not Keep.GRAPH), count)
    below = keeps[: count - graphs]
    if Keep.GRAPH in below:
        return None
    return tuple(_stretches(below, rebuilt)), graphs


def _stretches(keeps: tuple[Keep, ...], rebuilt: tuple[Keep, ...]) -> Iterator[Run]:
    start = 0
    for stop in range(1, len(keeps) + 1):
        rest = keeps[start + 1] if stop > start + 1 else None
        goes_on = stop < len(keeps) and keeps[stop] in (Keep.NONE, Keep.OUT) and rest in (None, keeps[stop])
        if not goes_on:
            yield Run(start, stop, keeps[start], rest or Keep.NONE, rebuilt[stop - 1])
            start = stop

"""What each layer keeps: the least time that fits.

Memory is spent in an order that follows from what a byte buys. Least of all memory takes a stack of *segments*, each
held by its first layer's hidden states and rebuilt in backward, attention included. Then come layers that keep their
attention output and get their hidden states by replaying those before them, then all that keep both, keys and values,
and at last plain graphs. Segments lie at the bottom, where least is held beneath them while they are rebuilt; graphs on
top, as they are the first to be freed. How many layers fall to each is searched exhaustively; the segments themselves
are a dynamic programme.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from longspan.keep import Budget, Keep, Memory
from longspan.plan.memory import MOVING_BYTES, Ledger, kept_bytes, moving_products
from longspan.plan.runs import Costs, Run
from longspan.plan.setup import Setup
from longspan.plan.stay import Stay


@dataclass(frozen=True)
class Choice:
    """What the layers of a setup keep.

    Args:
        runs: from the first layer up, without those that keep their graph.
        graphs: layers at the end that keep their graph.
        step_s: seconds of a step.
        gpu_bytes: at the fullest moment, by cause.
        host_bytes: of this rank.
    """

    setup: Setup
    runs: tuple[Run, ...]
    graphs: int
    step_s: float
    seconds: dict[str, float]
    gpu_bytes: dict[str, float]
    host_bytes: dict[str, float]
    budget: Budget

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all replicas together train on."""
        return self.setup.rows * self.setup.tokens * self.setup.data / self.step_s

    @property
    def memory(self) -> Memory:
        """The decision as layers take it."""
        keeps = [keep for run in self.runs for keep in run.keeps] + [Keep.GRAPH] * self.graphs
        rebuilt = [run.rebuilt for run in self.runs for _ in run.keeps] + [Keep.X_O] * self.graphs
        streams = any(keep is not Keep.GRAPH for keep in keeps)
        setup = self.setup
        compiles = setup.compiled and (streams or setup.tiles == 1)
        tile = (setup.tile_tokens or setup.shard_tokens) if streams or compiles else None
        same = len(set(rebuilt)) == 1
        return Memory(
            tile,
            keeps[0] if len(set(keeps)) == 1 else tuple(keeps),
            "inductor" if compiles else None,
            rebuilt[0] if same else tuple(rebuilt),
            self.budget,
        )


@dataclass(frozen=True)
class Room:
    """Bytes that kept tensors may take.

    Args:
        after_forward: once all layers have run.
        layers: while each layer runs backward.
        budget: how the tiers divide them.
    """

    after_forward: float
    layers: tuple[float, ...]
    budget: Budget


def solve(setup: Setup, rebuilds: bool = True, below_s: float = math.inf) -> Choice | None:
    """Return the fastest choice that fits, or None.

    Args:
        rebuilds: whether layers may run again outside their turn, which every rank must do alike.
        below_s: seconds of a step that are to be beaten; what is slower need not be found.
    """
    costs = Costs(setup)
    below_s -= sum(costs.clock.base.values()) + costs.plain_s[-1]
    if below_s <= 0:
        return None
    found: Choice | None = None
    for ledger in _ledgers(setup):
        room = _room(ledger)
        if room is None:
            continue
        best = min(_candidates(costs, room, ledger, rebuilds, below_s), key=lambda c: c[0], default=None)
        if best is not None:
            choice = choice_of(costs, ledger, room, *best[1:])
            if found is None or choice.step_s < found.step_s:
                found = choice
    return found


def _ledgers(setup: Setup) -> Iterator[Ledger]:
    """Yield ways to divide what is kept, from that which uses the host least."""
    yield Ledger(setup)
    yield Ledger(setup, MOVING_BYTES)
    if setup.compiled and moving_products(setup) > MOVING_BYTES:
        yield Ledger(setup, moving_products(setup))


def forced(costs: Costs, keep: Keep) -> Choice:
    """Return the choice that every layer keeps the same, whether it fits or not."""
    graphs = costs.count if keep is Keep.GRAPH else 0
    runs = tuple(Run(i, i + 1, keep) for i in range(costs.count - graphs))
    return choice_of(costs, Ledger(costs.setup), Room(math.inf, (math.inf,) * costs.count, Budget()), runs, graphs)


def fits(setup: Setup, rebuilds: bool = True) -> bool:
    """Tell whether anything fits: the longest segments from the bottom up hold the least."""
    costs = Costs(setup)
    for moving_bytes in (0, MOVING_BYTES):
        room = _room(Ledger(setup, moving_bytes))
        if room is not None and _least(costs, room, rebuilds) is not None:
            return True
    return False


def _room(ledger: Ledger) -> Room | None:
    """Return the room for kept tensors; None where there is none even without them."""
    capacity = ledger.capacity
    whole = [m for m in ledger.moments if m.layer is None and m.name in ("forward", "loss", "norm")]
    layers = sorted((m for m in ledger.moments if m.layer is not None), key=lambda m: m.layer or 0)
    needs_host = ledger.staged or ledger.host
    if max(moment.total for moment in ledger.moments) > capacity or (needs_host and ledger.host_capacity < 0):
        return None
    after_forward = capacity - max(moment.total for moment in whole)
    free = tuple(capacity - moment.total for moment in layers)
    if not ledger.staged:
        return Room(after_forward, free, Budget())
    gpu, host = int(min(after_forward, *free)), int(ledger.host_capacity)
    setup = ledger.setup
    whole = max(kept_bytes(Keep.X, setup, layer) for layer in setup.shape.layers)  # hidden states go to one tier
    both = float(gpu + host - whole)
    return Room(both, (both,) * len(free), Budget(gpu, host, moving_bytes=ledger.moving_bytes))


def _least(costs: Costs, room: Room, rebuilds: bool) -> list[Run] | None:
    """Return the runs that hold least, or None if they do not fit."""
    runs, held, start = [], 0.0, 0
    while start < costs.count:
        longest = None
        for stop in range(start + 1, (costs.longest(start) if rebuilds else start + 1) + 1):
            run = Run(start, stop, Keep.X, Keep.NONE, Keep.OUT)
            if held + costs.states(run, stop - 1) > room.layers[stop - 1]:
                break
            longest = run
        if longest is None:
            return None
        runs.append(longest)
        held += costs.held(longest)
        start = longest.stop
    return runs if held <= room.after_forward else None


Candidate = tuple[float, tuple[Run, ...], int]


def _candidates(
    costs: Costs, room: Room, ledger: Ledger, rebuilds: bool, best_s: float = math.inf
) -> Iterator[Candidate]:
    """Yield seconds of layers, runs and graphs of choices that fit.

    Args:
        best_s: seconds of recomputation that must be beaten where layers are rebuilt.
    """
    whole = list(_with_graphs(costs, room, ledger))
    if whole:  # whatever holds less computes more
        yield from whole
        return
    if not rebuilds:
        yield from _plain_recompute(costs, room)
        return
    chains = _chains(costs, room, 0, 0.0)
    if chains is not None:
        extra = sum(costs.extra_s(run) for run in chains)
        best_s = min(best_s, extra)
        yield extra + costs.plain_s[-1], chains, 0
    stacks = [
        (stack[1] + costs.least_s(layers), layers, stack)
        for layers, front in enumerate(_segments(costs, room, best_s))
        for stack in front
    ]
    for bound, layers, (held, seconds, below) in sorted(stacks, key=lambda s: s[:2]):
        if bound >= best_s:
            return
        chains = _chains(costs, room, layers, held)
        if chains is not None:
            extra = seconds + sum(costs.extra_s(run) for run in chains)
            best_s = min(best_s, extra)
            yield extra + costs.plain_s[-1], (*below, *chains), 0


def _with_graphs(costs: Costs, room: Room, ledger: Ledger) -> Iterator[Candidate]:
    """Yield choices in which every layer keeps x and O, or more: keys and values, products, or its graph."""
    count = costs.count
    graph_sums = [0, *accumulate(reversed(costs.graph))]
    seconds = [0, *accumulate(reversed(costs.graph_s))]
    top = ledger.graph_backward(count - 1).total
    for graphs in range(count + 1 if costs.graphs_pay else 1):
        if graphs and (top + graph_sums[graphs] > ledger.capacity or ledger.staged):
            return
        rest, after = count - graphs, room.after_forward - graph_sums[graphs]
        if not ledger.staged or ledger.moving_bytes >= moving_products(costs.setup):
            stacks = _rich(costs, room, rest, after)
        else:  # what travels is only what would be dear to compute again
            stacks = iter([tuple(Run(i, i + 1, Keep.X_O) for i in range(rest))])
            stacks = (runs for runs in stacks if _stack_fits(costs, room, runs, 0.0, after))
        for runs in stacks:
            extra = sum(costs.extra_s(run) for run in runs) + costs.copies_s(runs, room.budget.gpu_bytes)
            yield extra + costs.plain_s[rest] + seconds[graphs], runs, graphs


def _rich(costs: Costs, room: Room, count: int, after_forward: float) -> Iterator[tuple[Run, ...]]:
    """Yield stacks of `count` layers that keep x and O, as many as fit keys and values, and as many as fit products.

    Products lie on top: they are freed before the gradients of the layers below take their place.
    """
    for products in range(count + 1 if costs.setup.compiled else 1):
        runs = _most(costs, room, count, (Keep.X_O_KV, Keep.X_O), after_forward, products)
        if runs is None:
            return
        yield runs


def _plain_recompute(costs: Costs, room: Room) -> Iterator[Candidate]:
    """Yield the choice of x+O below and x alone above, in which no layer needs another."""
    runs = _most(costs, room, costs.count, (Keep.X_O, Keep.X), room.after_forward)
    if runs is not None:
        yield sum(costs.extra_s(run) for run in runs) + costs.plain_s[-1], runs, 0


def _most(
    costs: Costs, room: Room, count: int, keeps: tuple[Keep, Keep], after_forward: float, products: int = 0
) -> tuple[Run, ...] | None:
    """Return `count` layers of which as many as fit keep the first of two decisions; None if none may.

    Args:
        products: layers at the end that keep their products instead.
    """
    low, high, best = 0, count - products, None
    top = tuple(Run(i, i + 1, Keep.PRODUCTS) for i in range(count - products, count))
    while low <= high:
        middle = (low + high) // 2
        runs = (*(Run(i, i + 1, keeps[i >= middle]) for i in range(count - products)), *top)
        if _stack_fits(costs, room, runs, 0.0, after_forward):
            low, best = middle + 1, runs
        else:
            high = middle - 1
    return best


def _stack_fits(costs: Costs, room: Room, runs: Sequence[Run], held: float, after_forward: float) -> bool:
    """Tell whether runs fit on top of `held` bytes."""
    for run in runs:
        if any(held + costs.states(run, i) > room.layers[i] for i in range(run.start, run.stop)):
            return False
        held += costs.held(run)
    return held <= after_forward


Stack = tuple[float, float, tuple[Run, ...]]
"""Bytes held, seconds of recomputation, and runs that cover the first layers."""


def _segments(costs: Costs, room: Room, best_s: float) -> list[list[Stack]]:
    """Return, for each number of first layers, the segments over them that no others beat in both bytes and seconds.

    Args:
        best_s: seconds of recomputation that a choice is known for; stacks that cannot do better are left out.
    """
    fronts: list[list[Stack]] = [[(0.0, 0.0, ())], *([] for _ in range(costs.count))]
    for start in range(costs.count):
        fronts[start] = _undominated(fronts[start])
        for first, rebuilt in ((Keep.X, Keep.X_O), (Keep.X, Keep.OUT), (Keep.X_O, Keep.X_O), (Keep.X_O, Keep.OUT)):
            space = math.inf
            for stop in range(start + 1, costs.longest(start) + 1):
                run = Run(start, stop, first, Keep.NONE, rebuilt)
                space = min(space, room.layers[stop - 1] - costs.states(run, stop - 1))
                if space < 0:
                    break
                held, seconds = costs.held(run), costs.extra_s(run)
                most_s = best_s - costs.least_s(stop) - seconds
                fronts[stop] += [
                    (below + held, before + seconds, (*runs, run))
                    for below, before, runs in fronts[start]
                    if below <= space and below + held <= room.after_forward and before < most_s
                ]
    fronts[-1] = _undominated(fronts[-1])
    return fronts


def _undominated(stacks: list[Stack]) -> list[Stack]:
    """Keep the stacks of which none is smaller and as fast."""
    kept: list[Stack] = []
    for stack in sorted(stacks, key=lambda s: s[:2]):
        if not kept or stack[1] < kept[-1][1]:
            kept.append(stack)
    return kept


def _chains(costs: Costs, room: Room, start: int, held: float) -> tuple[Run, ...] | None:
    """Return how the layers from `start` on keep their outputs with as many hidden states as fit; None if none do."""
    single = tuple(Run(i, i + 1, Keep.X_O) for i in range(start, costs.setup.shape.edited))
    start += len(single)
    count = costs.count - start
    if count == 0:
        return single if _stack_fits(costs, room, single, held, room.after_forward) else None
    low, high, best = 1, count, None
    while low <= high:
        middle = (low + high) // 2
        edges = [start + count * i // middle for i in range(middle + 1)]
        runs = single + tuple(Run(a, b, Keep.X_O, Keep.OUT) for a, b in pairwise(edges))
        if _stack_fits(costs, room, runs, held, room.after_forward):
            low, best = middle + 1, runs
        else:
            high = middle - 1
    return best


def choice_of(costs: Costs, ledger: Ledger, room: Room, runs: tuple[Run, ...], graphs: int) -> Choice:
    """Work out the bytes and seconds of a choice."""
    clock, setup = costs.clock, costs.setup
    streamed = costs.count - graphs
    seconds = dict(clock.base)
    layers = setup.shape.layers
    seconds["attention"] = sum(sum(clock.attention_s(layer)) for layer in layers)
    seconds["layers"] = costs.plain_s[streamed] + sum(reversed(costs.graph_s[streamed:])) - seconds["attention"]
    seconds["recomputation"] = sum(costs.extra_s(run) for run in runs)
    stay = Stay(costs, ledger, room.budget.gpu_bytes, runs, graphs)
    causes = stay.fullest()
    causes["reserve"] = ledger.reserve
    host = dict(ledger.host)
    if room.budget.gpu_bytes is not None:
        host["kept by layers"] = max(0.0, stay.most - room.budget.gpu_bytes)
        seconds["host copies"] = costs.copies_s(runs, room.budget.gpu_bytes)
    return Choice(setup, runs, graphs, sum(seconds.values()), seconds, causes, host, room.budget)

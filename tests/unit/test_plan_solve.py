"""What layers keep: the search against brute force, against the published arithmetic, and what more memory may do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longspan.integrations.planning import task_for
from longspan.integrations.shapes import model_shape
from longspan.keep import Budget, Keep
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB, Cluster
from longspan.plan.memory import Ledger
from longspan.plan.runs import Costs, Run
from longspan.plan.setup import OPTIMIZERS, Setup
from longspan.plan.shapes import ModelShape
from longspan.plan.solve import Room, _candidates, _least, _segments, _stack_fits, fits, solve
from longspan.plan.tiles import tile_tokens
from longspan.plan.time import Clock


@cache
def llama8b(layers: int = 32) -> ModelShape:
    shape = model_shape("llama-8b")
    return replace(shape, layers=shape.layers[:layers])


def cluster(gpus: int = 2, gpu_gib: float = 139, host_gib: float = 256, name: str = "h200") -> Cluster:
    return Cluster(find_machine(name), gpus, min(gpus, 8), round(gpu_gib * GIB), round(host_gib * GIB))


def setup(tokens: int, layers: int = 32, **changes: object) -> Setup:
    base = Setup(llama8b(layers), cluster(), "fsdp2", OPTIMIZERS["adamw"], 2, 1, tokens, tile_tokens=16_384)
    return replace(base, **changes)  # type: ignore[arg-type]


def even(costs: Costs, room_bytes: float) -> Room:
    return Room(room_bytes, (room_bytes,) * costs.count, Budget())


def every_choice(costs: Costs, start: int = 0) -> Iterator[tuple[Run, ...]]:
    """Yield all sequences of runs over the layers from `start` on."""
    if start == costs.count:
        yield ()
        return
    first = [Run(start, start + 1, keep) for keep in (Keep.X_O_KV, Keep.X_O, Keep.X)]
    for stop in range(start + 2, costs.count + 1):
        first.append(Run(start, stop, Keep.X_O, Keep.OUT))
        for keep in (Keep.X, Keep.X_O):
            first += [Run(start, stop, keep, Keep.NONE, rebuilt) for rebuilt in (Keep.X_O, Keep.OUT)]
    for run in first:
        for rest in every_choice(costs, run.stop):
            yield (run, *rest)


def best_of_all(costs: Costs, room: Room) -> float:
    fitting = (runs for runs in every_choice(costs) if _stack_fits(costs, room, runs, 0.0, room.after_forward))
    return min((sum(map(costs.extra_s, runs)) for runs in fitting), default=math.inf)


@pytest.mark.parametrize(("tokens", "layers"), [(1 << 15, 4), (1 << 17, 4), (1 << 20, 5)])
def test_search_against_brute_force(tokens: int, layers: int) -> None:
    costs = Costs(setup(tokens, layers=layers))
    ledger = Ledger(replace(costs.setup, cluster=cluster(gpu_gib=1)))  # no room for graphs, which are not enumerated
    x, out, kv = costs.x[0], costs.out[0], costs.more[Keep.X_O_KV][0]
    sizes = sorted({a * x + b * out + c * kv for a in range(6) for b in range(6) for c in (0, 2, 5)})
    differ = 0
    for size in sizes:
        room = even(costs, size)
        found = min((c[0] for c in _candidates(costs, room, ledger, True)), default=math.inf)
        best = best_of_all(costs, room) + costs.plain_s[-1]
        assert found == pytest.approx(best, rel=5e-3), size / x  # keys and values go to whole stacks only
        assert (found == math.inf) == (_least(costs, room, True) is None)
        differ += found not in (math.inf, best)
    assert len(sizes) > 50
    assert differ < len(sizes) // 2


def test_brute_force_would_notice() -> None:
    """The comparison above is not trivial: the choices it ranks differ."""
    costs = Costs(setup(1 << 20, layers=4))
    extras = {round(sum(map(costs.extra_s, runs)), 6) for runs in every_choice(costs)}
    assert len(extras) > 30


def kib_per_token(size: float, tokens: int) -> float:
    return size / tokens / 1024


def test_published_bytes_per_token() -> None:
    """Llama-3-8B on one GPU: x and O everywhere take 516 KiB a token; O with x every 8 layers 284 or 292, as x at the
    start of the first counts or not; segments of 7, 6, 5, 4, 4, 3, 2 and 1 layers 64.5 besides the x at hand."""
    tokens = 1 << 20
    costs = Costs(setup(tokens, ulysses=1, cluster=cluster(1)))
    whole = sum(costs.x) + sum(costs.out)
    assert kib_per_token(whole, tokens) == 516
    chains = sum(costs.held(Run(i, i + 8, Keep.X_O, Keep.OUT)) for i in range(0, 32, 8))
    assert kib_per_token(chains, tokens) == 292
    peaks = []
    room_kib = 8.0
    while True:
        runs = _least(costs, even(costs, room_kib * 1024 * tokens), True)
        if runs is not None:
            break
        room_kib += 0.125
    held = 0.0
    for run in runs:
        peaks.append(held + costs.states(run, run.stop - 1))
        held += costs.held(run)
    assert [run.stop - run.start for run in runs] == [7, 6, 5, 4, 4, 3, 2, 1]
    assert kib_per_token(max(peaks) - costs.x[0], tokens) == 64.5


@pytest.mark.parametrize("tokens", [131_072, 524_288, 1_048_576])
def test_layers_whose_input_is_edited_keep_it(tokens: int) -> None:
    """DeepStack adds to hidden states after the first three layers, so the next ones cannot be rebuilt from these."""
    plain = setup(tokens)
    edited = replace(plain, shape=replace(plain.shape, edited=3))
    found, free = solve(edited), solve(plain)
    assert free is not None
    assert found is not None
    keeps = found.memory.decisions * (32 if len(found.memory.decisions) == 1 else 1)
    assert not any(keep.rebuilds for keep in keeps[:4])
    assert found.step_s >= free.step_s
    if tokens > 1_000_000:
        assert any(keep.rebuilds for keep in keeps[4:])


def test_segments_attend_twice() -> None:
    """The least memory costs each rebuilt layer one attention forward, 1.97 per layer in all."""
    costs = Costs(setup(1 << 20, ulysses=1, cluster=cluster(1)))
    room = even(costs, 72.5 * 1024 * (1 << 20))
    stacks = _segments(costs, room, math.inf)[-1]
    fastest = min(stacks, key=lambda stack: stack[1])
    attend_s = costs.clock.attention_s(costs.setup.shape.layers[0])[0]
    forwards = 1 + fastest[1] / (32 * attend_s)
    assert 1.9 < forwards < 2.35  # of recomputation about a fifth is matrix products


def test_more_memory_keeps_more() -> None:
    """From plenty to little: all products, some, keys and values, hidden states of some layers, segments."""
    levels = []
    for gib in (400, 139, 108, 95, 80, 70, 64):
        choice = solve(setup(1 << 17, cluster=cluster(2, gib, 0)))
        levels.append("none" if choice is None else " ".join(sorted({str(k) for r in choice.runs for k in r.keeps})))
    assert levels[0] == "products"
    assert "products" in levels[1] and "products" not in levels[3]
    assert "x+O+KV" in levels[2]
    assert {"O", "none"} & set(levels[-2].split())
    assert len(set(levels)) >= 5


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1 << 12, 1 << 21),
    st.floats(40, 180),
    st.floats(1.0, 2.0),
    st.floats(0, 600),
    st.floats(1.0, 2.0),
    st.sampled_from(sorted(OPTIMIZERS)),
)
@example(255_550, 69.0, 1.5, 128.0, 1.0, "adamw-bf16-sr")
def test_more_memory_is_never_slower(
    tokens: int, gpu_gib: float, more_gpu: float, host_gib: float, more_host: float, optimizer: str
) -> None:
    base = setup(tokens, layers=8, optimizer=OPTIMIZERS[optimizer])
    less = solve(replace(base, cluster=cluster(2, gpu_gib, host_gib)))
    more = solve(replace(base, cluster=cluster(2, gpu_gib * more_gpu, host_gib * more_host)))
    if less is not None:
        assert more is not None
        assert more.step_s <= less.step_s * (1 + 1e-9)
        assert fits(replace(base, cluster=cluster(2, gpu_gib, host_gib)))


@settings(max_examples=25, deadline=None)
@given(st.integers(1 << 12, 1 << 22), st.floats(30, 150), st.floats(0, 600))
def test_what_fits_is_found_and_within_capacity(tokens: int, gpu_gib: float, host_gib: float) -> None:
    tried = setup(tokens, layers=8, cluster=cluster(2, gpu_gib, host_gib))
    choice = solve(tried)
    assert fits(tried) == (choice is not None)
    if choice is not None:
        assert sum(choice.gpu_bytes.values()) <= tried.cluster.gpu_bytes * (1 + 1e-9)
        assert sum(choice.host_bytes.values()) <= tried.cluster.host_bytes / 2
        assert sum(len(run.keeps) for run in choice.runs) + choice.graphs == 8
        assert choice.memory.streams or choice.graphs == 8
        assert all(s >= 0 for s in choice.seconds.values())


@settings(max_examples=10, deadline=None)
@given(st.floats(60, 150), st.floats(1.0, 1.5))
def test_more_memory_is_never_shorter(gpu_gib: float, more: float) -> None:
    less, bigger = (
        task_for(llama8b(4), cluster(2, gib, 100), "fsdp2", "auto").longest for gib in (gpu_gib, gpu_gib * more)
    )
    assert bigger >= less


def test_choices_repeat() -> None:
    one, two = (solve(setup(3 << 18)) for _ in range(2))
    assert one == two


@pytest.mark.parametrize(("gpus", "longest"), [(1, 500_000), (8, 3_700_000), (32, 15_000_000)])
def test_lengths_of_8b_on_h100_nodes(gpus: int, longest: int) -> None:
    """80 GB per GPU, 1.9 TB of host memory per node."""
    nodes = cluster(gpus, find_machine("h100-80g").memory_bytes / GIB, 1.9e12 / GIB, "h100")
    assert task_for(llama8b(), nodes, "fsdp2", "auto").longest >= longest


def test_replicas_do_not_rebuild() -> None:
    """Where ranks may see other lengths, no layer runs again outside its turn."""
    base = task_for(llama8b(), cluster(2, 139, 0), "fsdp2", "adamw-bf16-sr")
    free, bound = base, replace(base, rebuilds=False)
    tokens = 1 << 20
    assert free.choose(tokens) is not None
    assert bound.choose(tokens) is None
    shorter = bound.choose(1 << 18)
    assert shorter is not None
    assert all(run.stop - run.start == 1 for run in shorter.runs)
    assert bound.longest < free.longest


@pytest.mark.parametrize(
    ("shard", "most", "tile"),
    [
        (16_384, 16_384, 16_384),
        (65_536, 16_384, 16_384),
        (24_576, 16_384, 12_288),  # divided evenly
        (5120, 16_384, 5120),
        (20_000, 16_384, 2048),  # 1,568 remain
        (33_000, 16_384, 16_384),  # 232 remain
        (1500, 16_384, 1024),
        (700, 16_384, 512),
        (1, 16_384, 1),
    ],
)
def test_tiles(shard: int, most: int, tile: int) -> None:
    assert tile_tokens(shard, most) == tile


@given(st.integers(1, 1 << 20), st.sampled_from([1024, 4096, 16_384]))
def test_tiles_leave_little(shard: int, most: int) -> None:
    tile = tile_tokens(shard, most)
    assert 1 <= tile <= min(shard, most)
    if shard >= 8 * 1024:
        assert shard % tile <= shard // 8
    assert tile % 256 == 0 or tile & (tile - 1) == 0


def test_few_tile_sizes_for_odd_lengths() -> None:
    sizes = {tile_tokens(shard, 16_384) for shard in range(1025, 70_000, 2)}
    assert len(sizes) <= 5


def test_states_of_a_segment() -> None:
    """While its layers run backward, a rebuilt segment holds O of each, and x of each or of the first."""
    costs = Costs(setup(1 << 17))
    x, out = costs.x[0], costs.out[0]
    for count in (1, 2, 5):
        both, outs = (Run(3, 3 + count, Keep.X, Keep.NONE, rebuilt) for rebuilt in (Keep.X_O, Keep.OUT))
        assert costs.held(both) == costs.held(outs) == x
        assert costs.states(both, 2 + count) == count * (x + out)
        assert costs.states(outs, 2 + count) == x + count * out
        assert costs.states(both, 3) == costs.states(outs, 3) == x + out
    chain = Run(0, 4, Keep.X_O, Keep.OUT)
    assert costs.held(chain) == costs.states(chain, 3) == x + 4 * out


def test_products_that_run_again() -> None:
    """Of a compiled layer that keeps k and v, 69 % of the products; of one that runs eagerly, all; attention never."""
    for compiled, share in ((True, 0.692), (False, 1.0)):
        clock = Clock(setup(1 << 17, compiled=compiled))
        layer = clock.setup.shape.layers[0]
        products = clock.products_s(layer.active)
        elementwise = clock.elementwise_s(layer, backward=False) * (0.5 if compiled else 1)
        again = clock.again_s(layer, Keep.X_O_KV)
        assert again - elementwise == pytest.approx(share * products, rel=1e-2)
        more = clock.again_s(layer, Keep.X) - clock.again_s(layer, Keep.X_O)
        assert more >= clock.attention_s(layer)[0]
    assert Clock(setup(1 << 17)).again_s(layer, Keep.PRODUCTS) < 0.2 * products


def test_host_holds_products_where_copies_are_hidden() -> None:
    """A host's memory makes a step faster, by what need not be computed again, but only if its link keeps up."""
    tokens = 1 << 17
    alone = solve(setup(tokens, cluster=cluster(2, 139, 0)))
    helped = solve(setup(tokens, cluster=cluster(2, 139, 256)))
    assert alone is not None and helped is not None
    assert helped.step_s < 0.98 * alone.step_s
    assert helped.host_bytes["kept by layers"] > 50 * GIB
    assert helped.seconds["host copies"] == 0
    assert sum(run.first is Keep.PRODUCTS for run in helped.runs) > 20
    moving, layer = helped.budget.moving_bytes, Costs(helped.setup).held(Run(31, 32, Keep.PRODUCTS))
    assert moving is not None and moving >= 2 * layer, "one layer's on its way while another's is in use"

    machine = replace(find_machine("h200"), host_gbs=2.0)
    slow = solve(setup(tokens, cluster=replace(cluster(2, 139, 256), machine=machine)))
    assert slow is not None
    assert slow.host_bytes.get("kept by layers", 0) == 0
    assert slow.step_s == pytest.approx(alone.step_s)


def test_copies_that_outlast_their_layers_cost_time() -> None:
    costs = Costs(setup(1 << 17))
    runs = tuple(Run(i, i + 1, Keep.X_O) for i in range(costs.count))
    size, rate = costs.held(runs[0]), costs.setup.cluster.machine.host_gbs * 1e9
    assert costs.copies_s(runs, None) == 0
    assert costs.copies_s(runs, costs.count * size) == 0
    forward_s, backward_s = costs.forward[0], costs.plain[0] - costs.forward[0] + costs.extra_s(runs[0])
    slow = Costs(replace(costs.setup, cluster=replace(cluster(), machine=replace(find_machine("h200"), host_gbs=0.5))))
    moved_s = size / 0.5e9
    expected = 3 * (2 * moved_s - forward_s - backward_s)
    assert moved_s > backward_s > forward_s > size / rate
    assert slow.copies_s(runs, (costs.count - 3) * size) == pytest.approx(expected)

"""Rebuilt layers and kept tensors outside the GPU against one device, in fp64: every pattern, tier and engine."""

from __future__ import annotations

import copy
import gc
import os
import random
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import longspan
from dense import TOLERANCE, relative
from lazy import LazyLane
from longspan.attention.ring import Ring
from longspan.engines import build_engine
from longspan.errors import ConfigError, ModelError, TrainingError
from longspan.keep import Budget, Keep, Memory
from longspan.stream.mixing import PrefixMixing
from longspan.stream.passage import Passage
from longspan.stream.prefix import Prefix
from longspan.stream.segment import Segment
from longspan.stream.stash import Stash
from models import Rows, build, gradients, one_device
from pool import RunRanks
from test_parity import compare
from test_stream import wide

pytestmark = pytest.mark.dist

PACKED = Rows([[20, 1, 6, 14]])
RAGGED = Rows([[13, 4], [29], [1, 1, 8]])
LAYERS = 5
TEMPORARY = tempfile.gettempdir()

PATTERNS: dict[str, tuple[str, str | Sequence[str]]] = {
    "out": ("x+O O O O O", "x+O"),
    "out after x": ("x O O x O", "x+O"),
    "out, x not last": ("x+O+KV O O graph x", "x+O"),
    "none": ("x none none none none", "x+O"),
    "none, keys kept": ("x+O+KV none x none none", "x+O+KV"),
    "none, then out": ("x none none none none", "O"),
    "none, then x": ("x+O none none none none", "x"),
    "nested": ("x none none none none", "none"),
    "nested in halves": ("x none none none none", ["none", "none", "x", "none", "none"]),
    "nested in kinds": ("x none none none none", ["x+O", "O", "none", "x", "O"]),
    "mixed": ("x O none O none", ["O", "x+O", "none", "x+O", "O"]),
    "mixed, nested": ("x+O none O none O", "none"),
    "graph between": ("x none graph x+O O", "O"),
    "none rebuilt": ("x+O x x+O+KV x x+O", "x+O"),
}
COMPILED = {"products": ("products O none products x", "products")}
BUDGETS = {
    "gpu": Budget(),
    "host": Budget(0, 1 << 22),
    "file": Budget(0, 0, TEMPORARY),
    "gpu and host": Budget(40_000, 1 << 22),
    "host and file": Budget(0, 60_000, TEMPORARY),
    "all": Budget(20_000, 30_000, TEMPORARY),
}


def memory_of(pattern: str, budget: str, tile: int = 11, backend: str | None = None) -> Memory:
    keep, rebuilt = (PATTERNS | COMPILED)[pattern]
    decision = Keep(rebuilt) if isinstance(rebuilt, str) else tuple(Keep(k) for k in rebuilt)
    return Memory(tile, tuple(Keep(k) for k in keep.split()), backend, decision, BUDGETS[budget])


def within(stash: Stash) -> None:
    """Check that no tier ever held more than its budget, and that nothing is left."""
    usage, budget = stash.usage, stash.budget
    assert budget.gpu_bytes is None or usage.peak["gpu"] <= budget.gpu_bytes
    assert usage.peak["host"] <= budget.host_bytes
    assert budget.directory is not None or usage.peak["file"] == 0
    assert not any(usage.now.values()), usage.now


def one_error(model: Any, wanted: dict[str, Tensor], loss: float, memory: Memory, degrees: Any, rows: Rows) -> float:
    """Train one step, and return the largest relative error of the loss and the gradients."""
    model.zero_grad()
    handle = longspan.prepare(
        model, degrees[0] * degrees[1], ulysses_degree=degrees[0], ring_degree=degrees[1], memory=memory
    )
    out = model(**handle.shard(rows.batch()))
    out.loss.backward()
    handle.reduce_gradients()
    found = relative(out.loss.detach(), torch.tensor(loss, dtype=torch.float64))
    del out
    within(handle.stash)
    handle.remove()
    return max(found, *compare(model, wanted).values())


def errors_of(memories: list[Memory], degrees: tuple[int, int], rows: Rows) -> list[float]:
    model = build("llama", layers=LAYERS)
    with wide():
        loss, wanted, _ = one_device(model, [rows])
        return [one_error(model, wanted, loss, memory, degrees, rows) for memory in memories]


DEGREES = pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2)], ids=["one", "u2", "r2"])


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_pattern_is_exact_in_every_tier(run_ranks: RunRanks, budget: str) -> None:
    check_patterns(run_ranks, budget, (1, 1))


def check_patterns(run_ranks: RunRanks, budget: str, degrees: tuple[int, int]) -> None:
    names = list(PATTERNS)
    for some in (names[0::3], names[1::3], names[2::3]):
        memories = [memory_of(pattern, budget) for pattern in some]
        for errors in run_ranks(degrees[0] * degrees[1], errors_of, memories, degrees, PACKED):
            assert max(errors) < TOLERANCE, dict(zip(some, errors, strict=True))


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["u2", "r2"])
@pytest.mark.parametrize("budget", ["gpu", "all"])
def test_every_pattern_is_exact_on_ranks(run_ranks: RunRanks, degrees: tuple[int, int], budget: str) -> None:
    check_patterns(run_ranks, budget, degrees)


def any_memory(seed: int) -> Memory:
    """Make up decisions that may follow each other, and budgets."""
    draw, eager = random.Random(seed), [k for k in Keep if k is not Keep.PRODUCTS]
    keep: list[Keep] = []
    for _ in range(LAYERS):
        first = not keep or keep[-1] is Keep.GRAPH
        keep.append(draw.choice([k for k in eager if not (first and k.rebuilds)]))
    keep[-1] = Keep.X if keep == [Keep.GRAPH] * LAYERS else keep[-1]
    rebuilt = tuple(draw.choice([k for k in eager if k is not Keep.GRAPH]) for _ in range(LAYERS))
    budget = Budget(draw.choice([0, 9_000, 40_000]), draw.choice([0, 30_000, 90_000]), TEMPORARY)
    return Memory(draw.choice([3, 7, 100]), tuple(keep), None, rebuilt, budget)


@DEGREES
def test_any_decisions_are_exact(run_ranks: RunRanks, degrees: tuple[int, int]) -> None:
    for first in range(0, 12, 4):
        memories = [any_memory(seed) for seed in range(first, first + 4)]
        for errors in run_ranks(degrees[0] * degrees[1], errors_of, memories, degrees, RAGGED):
            assert max(errors) < TOLERANCE, max(zip(errors, memories, strict=True), key=lambda pair: pair[0])


def late_errors(memories: list[Memory], degrees: tuple[int, int], rows: Rows) -> list[float]:
    with patch("longspan.stream.stores.Lane", LazyLane):
        return errors_of(memories, degrees, rows)


@DEGREES
def test_copies_may_be_late(run_ranks: RunRanks, degrees: tuple[int, int]) -> None:
    patterns = ("out after x", "none, then out", "nested in kinds", "mixed")
    memories = [memory_of(pattern, budget) for pattern in patterns for budget in ("host", "all")]
    for errors in run_ranks(degrees[0] * degrees[1], late_errors, memories, degrees, PACKED):
        assert max(errors) < TOLERANCE, errors


def test_compiled_halves_are_exact(run_ranks: RunRanks) -> None:
    memories = [memory_of(pattern, "all", tile=20, backend="eager") for pattern in ("mixed", "products")]
    (errors,) = run_ranks(1, errors_of, memories, (1, 1), PACKED)
    assert max(errors) < TOLERANCE, errors


def runs(memory: Memory, degrees: tuple[int, int]) -> tuple[float, int]:
    """Count how often attention runs forward in one step, over all layers, and a layer so that another is rebuilt."""
    model = build("llama", layers=memory_layers(memory))
    calls = []
    kind = Ring if degrees[1] > 1 else Prefix
    real: Any = kind.forward

    def counted(self: Any, *args: Any) -> Any:
        calls.append(self)
        return real(self, *args)

    handle = longspan.prepare(
        model,
        degrees[0] * degrees[1],
        ulysses_degree=degrees[0],
        ring_degree=degrees[1],
        kv_exchange="ring",
        memory=memory,
    )
    part = handle.shard(PACKED.batch())
    advance = patch.object(Segment, "_advance", autospec=True, side_effect=Segment._advance)
    with patch.object(kind, "forward", counted), advance as advanced:
        model(**part).loss.backward()
    return len(calls) / (1 if degrees[1] > 1 else len(part["longspan"].tiles.local)), advanced.call_count


def memory_layers(memory: Memory) -> int:
    assert not isinstance(memory.keep, Keep)
    return len(memory.keep)


@DEGREES
@pytest.mark.parametrize(
    ("keep", "rebuilt", "attended", "advanced"),
    [
        ("x+O O O O", "none none none none", 4, 3 + 2 + 1),
        ("x O O O", "x+O x+O x+O x+O", 5, 3 + 2 + 1),
        ("x none none none", "x+O x+O x+O x+O", 8, 3),
        ("x none none none", "O O O O", 8, 3 + 2 + 1),
        ("x+O none none none", "x+O x+O x+O x+O", 7, 3),
        ("x+O none none none", "O O x+O O", 7, 3 + 1),
        ("x+O none O none", "O O O O", 6, 3 + 2 + 1),
        ("x none none none", "none none none none", 2 + 3 + 3 + 3, 3 + 2),
        ("x none none none", "x x x x", 2 + 3 + 3 + 3, 3),
    ],
)
def test_layers_run_so_often(
    run_ranks: RunRanks, degrees: tuple[int, int], keep: str, rebuilt: str, attended: int, advanced: int
) -> None:
    again = tuple(Keep(k) for k in rebuilt.split())
    memory = Memory(5, tuple(Keep(k) for k in keep.split()), None, again)
    counts = run_ranks(degrees[0] * degrees[1], runs, memory, degrees)
    assert counts == [(attended, advanced)] * len(counts)


def sharded_errors(memories: list[Memory], size: int) -> float:
    """Return the largest relative error of gradients under FSDP2, twice in a row."""
    worst = 0.0
    engine = build_engine("fsdp2", torch.distributed.get_world_size())
    for memory in memories:
        model = build("llama", layers=LAYERS)
        with wide():
            _, wanted, _ = one_device(model, [PACKED])
            handle = longspan.prepare(model, size, grad_reduction=engine.grad_reduction, memory=memory)
            module = engine.wrap(model, handle)
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                with engine.accumulating(last=True):
                    module(**handle.shard(PACKED.batch())).loss.backward()
                engine.reduce()
            within(handle.stash)
        for name, parameter in model.named_parameters():
            whole: Any = parameter.grad
            worst = max(worst, relative(whole.full_tensor(), wanted[name.removeprefix("module.")]))
    return worst


@pytest.mark.parametrize("size", [1, 2])
def test_sharded_parameters(run_ranks: RunRanks, size: int) -> None:
    memories = [memory_of(p, b) for p, b in (("out", "all"), ("nested", "host"), ("mixed", "gpu and host"))]
    for worst in run_ranks(2, sharded_errors, memories, size):
        assert worst < TOLERANCE


@contextmanager
def without_collector() -> Iterator[None]:
    """Let nothing be freed but by its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def prepared(pattern: str, budget: str) -> tuple[Any, Any, Any]:
    model = build("llama", layers=LAYERS)
    handle = longspan.prepare(model, 1, memory=memory_of(pattern, budget))
    return model, handle, handle.shard(PACKED.batch())


def leaks(pattern: str, budget: str) -> None:
    """Check that nothing stays after a loss that was dropped, a failed pass, an evaluation, and a step."""
    model, handle, part = prepared(pattern, budget)
    stash = handle.stash
    with without_collector():
        loss = model(**part).loss
        assert sum(stash.usage.now.values()) > 0
        held = stash.usage.now["host"] + stash.usage.now["file"] + stash.usage.now["gpu"]
        del loss
        within(stash)
        broken = model.model.layers[-1].mlp.forward
        model.model.layers[-1].mlp.forward = _fail
        with pytest.raises(ZeroDivisionError):
            model(**part)
        model.model.layers[-1].mlp.forward = broken
        with torch.no_grad():
            before = dict(stash.usage.now)
            model(**part)
            assert {k: v for k, v in stash.usage.now.items() if k != "moving"} == {
                k: v for k, v in before.items() if k != "moving"
            }
        loss = model(**part).loss
        now = stash.usage.now
        assert now["host"] + now["file"] + now["gpu"] == held, "a failed pass left something"
        loss.backward()
        within(stash)


def _fail(*args: Any) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize("pattern", ["out", "none", "mixed", "nested in kinds"])
@pytest.mark.parametrize("budget", ["gpu and host", "all", "file"])
def test_nothing_leaks(run_ranks: RunRanks, pattern: str, budget: str) -> None:
    run_ranks(1, leaks, pattern, budget)


def outlived(family: str, keep: str) -> None:
    """Check that what a forward pass carries goes with its graph, though the nodes of the graph hold it."""
    model = build(family, layers=3)
    model.config.output_router_logits = "moe" in family
    handle = longspan.prepare(model, 1, memory=Memory(11, tuple(Keep(k) for k in keep.split())))
    part = handle.shard(PACKED.batch())
    real, refs = handle.passage, []

    def passage(*args: Any) -> Any:
        made = real(*args)
        refs.append(weakref.ref(made))
        return made

    handle.passage = passage  # type: ignore[method-assign]
    with without_collector():
        loss = model(**part).loss
        del loss
        model(**part).loss.backward()
        assert [ref() for ref in refs] == [None, None]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_forward_pass_goes_with_its_graph(run_ranks: RunRanks, family: str) -> None:
    for keep in ("x+O x x+O+KV", "x+O O none", "graph x none"):
        run_ranks(1, outlived, family, keep)


def balanced(keep: str, rebuilt: str) -> float:
    """Return how far gradients are from those of layers that keep their graph, with the router's auxiliary loss."""
    found = []
    for memory in ("auto", Memory(11, tuple(Keep(k) for k in keep.split()), None, Keep(rebuilt), BUDGETS["all"])):
        model = build("qwen3-moe", layers=3)
        model.config.output_router_logits = True
        handle = longspan.prepare(model, torch.distributed.get_world_size(), memory=memory)
        with wide():
            model(**handle.shard(PACKED.batch())).loss.backward()
        handle.reduce_gradients()
        found.append(gradients(model))
    return max(relative(found[1][name], found[0][name]) for name in found[0])


@pytest.mark.parametrize(("keep", "rebuilt"), [("x+O O O", "x+O"), ("x none none", "none"), ("x none O", "O")])
def test_routers_of_rebuilt_layers(run_ranks: RunRanks, keep: str, rebuilt: str) -> None:
    for world in (1, 2):
        assert max(run_ranks(world, balanced, keep, rebuilt)) < TOLERANCE


def freed(budget: str) -> list[bool]:
    """Tell which layers' hidden states are still on the device when the head runs."""
    model = build("llama", layers=LAYERS)
    handle = longspan.prepare(model, 1, memory=Memory(5, Keep.X_O, budget=BUDGETS[budget]))
    refs: list[StorageWeakRef] = []
    found: list[bool] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda m, args: refs.append(StorageWeakRef(args[0].untyped_storage())))
    model.lm_head.register_forward_hook(lambda *args: found.extend(ref.expired() for ref in refs))
    loss = model(**handle.shard(PACKED.batch())).loss
    assert [ref.expired() for ref in refs] == found
    loss.backward()
    return found


def test_hidden_states_that_left_are_gone(run_ranks: RunRanks) -> None:
    assert run_ranks(1, freed, "host") == [[True] * LAYERS]
    assert run_ranks(1, freed, "file") == [[True] * LAYERS]
    (some,) = run_ranks(1, freed, "gpu and host")
    assert some == sorted(some, reverse=True), "the first layers leave"
    assert 0 < sum(some) < LAYERS


def interleaved(pattern: str, budget: str, order: tuple[int, int]) -> float:
    """Return the largest error of gradients when two forward passes precede two backward ones."""
    model = build("llama", layers=LAYERS)
    with wide():
        wanted = [one_device(model, [rows])[1] for rows in (PACKED, RAGGED)]
        handle = longspan.prepare(model, 1, memory=memory_of(pattern, budget))
        losses = [model(**handle.shard(rows.batch())).loss for rows in (PACKED, RAGGED)]
        for index in order:
            losses[index].backward()
        losses.clear()
        within(handle.stash)
    found = gradients(model)
    return max(relative(found[name], wanted[0][name] + wanted[1][name]) for name in found)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_passes_may_interleave(run_ranks: RunRanks, order: tuple[int, int]) -> None:
    for pattern, budget in (("out", "all"), ("mixed", "gpu and host"), ("nested", "file")):
        assert run_ranks(1, interleaved, pattern, budget, order)[0] < TOLERANCE


def surrounded(kind: str, pattern: str, budget: str) -> float:
    """Return the error of gradients where something surrounds the model that looks at saved tensors."""
    from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
    from torch.utils.checkpoint import checkpoint

    model, plain = build("llama", layers=LAYERS), build("llama", layers=LAYERS)
    with patch("longspan.stream.stores.Lane", LazyLane):
        handle = longspan.prepare(model, 1, memory=memory_of(pattern, budget))
    part = handle.shard(PACKED.batch())
    plain(**longspan.prepare(plain, 1).shard(PACKED.batch())).loss.backward()
    if kind == "checkpoint":
        loss = checkpoint(lambda: model(**part).loss, use_reentrant=False)
    else:
        with save_on_cpu() if kind == "save_on_cpu" else saved_tensors_hooks(torch.clone, lambda t: t):
            loss = model(**part).loss
    loss.backward()
    del loss
    within(handle.stash)
    return max(compare(model, gradients(plain)).values())


@pytest.mark.parametrize("kind", ["checkpoint", "save_on_cpu", "clones"])
def test_saved_tensor_hooks_may_look_on(run_ranks: RunRanks, kind: str) -> None:
    for pattern in ("none rebuilt", "mixed"):
        assert run_ranks(1, surrounded, kind, pattern, "host")[0] < TOLERANCE
        assert run_ranks(1, surrounded, kind, pattern, "all")[0] < TOLERANCE


def repeated() -> None:
    """Differentiate twice what keeps its own state, and be told where that cannot be."""
    model = build("llama", layers=LAYERS)
    handle = longspan.prepare(model, 1, memory=Memory(5, Keep.X_O, budget=BUDGETS["all"]))
    loss = model(**handle.shard(PACKED.batch())).loss
    loss.backward(retain_graph=True)
    first = {name: g.clone() for name, g in gradients(model).items()}
    loss.backward()
    assert all(torch.equal(g, 2 * first[name]) for name, g in gradients(model).items())
    model, handle, part = prepared("out", "all")
    loss = model(**part).loss
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match="differentiated once"):
        loss.backward()
    assert copy.deepcopy(model)._longspan_applied.stash is not handle.stash


def test_a_second_backward(run_ranks: RunRanks) -> None:
    run_ranks(1, repeated)


def _raise(code: int) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def failures() -> None:
    """Be told what goes wrong with budgets and files, and go on afterwards."""
    model, handle, part = prepared("mixed", "file")
    for name, code, match in (
        ("posix_fallocate", 28, "does not take .* more of kept tensors .*No space left.*: make room there"),
        ("pwritev", 5, "could not be written in the directory .*Input/output error"),
        ("preadv", 5, "could not be read in the directory .*Input/output error"),
    ):
        with patch.object(os, name, _raise(code)), pytest.raises(TrainingError, match=match):
            model(**part).loss.backward()
    model.zero_grad()
    model(**part).loss.backward()
    within(handle.stash)
    handle.remove()
    with pytest.raises(ConfigError, match="No file for kept tensors can be made in the directory /nowhere"):
        longspan.prepare(model, 1, memory=Memory(5, Keep.X, budget=Budget(0, 0, "/nowhere")))
    handle = longspan.prepare(model, 1, memory=Memory(5, Keep.X, budget=Budget(10_000, 20_000)))
    with pytest.raises(ConfigError, match=r"keep \d+ bytes .* gpu_bytes has 10000 bytes .* \d+ bytes are missing"):
        model(**part)
    assert not any(handle.stash.usage.now.values())
    with pytest.raises(ConfigError, match="no effect without gpu_bytes"):
        Budget(None, 5)


def test_failures_are_told(run_ranks: RunRanks) -> None:
    run_ranks(1, failures)


def rebuilding_needs_more() -> None:
    """Budgets that hold what forward keeps, but not what backward adds: refused before anything runs."""
    model = build("llama", layers=LAYERS)
    rebuilt = (Keep.X,) + (Keep.NONE,) * (LAYERS - 1)
    for keep, before in ((rebuilt, False), (Keep.X, False), (rebuilt, True), (Keep.X, True)):
        memory = Memory(5, keep, rebuilt=Keep.X_O)
        handle = longspan.prepare(model, 1, memory=memory)
        part = handle.shard(PACKED.batch())
        model(**part).loss.backward()
        needed = handle.stash.usage.peak["gpu"]  # of a step without a budget
        handle.remove()
        handle = longspan.prepare(model, 1, memory=replace(memory, budget=Budget(needed - 8 if before else needed)))
        if not before:
            model(**part).loss.backward()
        else:
            with pytest.raises(ConfigError, match="8 bytes are missing"):
                model(**part)
        handle.remove()


def test_a_rebuilt_segment_counts(run_ranks: RunRanks) -> None:
    run_ranks(1, rebuilding_needs_more)


def removed() -> None:
    """What a handle kept outside the GPU outlives it as long as somebody needs it, and not longer."""
    model, handle, part = prepared("out, x not last", "host")
    plain = build("llama", layers=LAYERS)
    other = longspan.prepare(plain, 1)
    loss, stash = model(**part).loss, handle.stash
    stash.close()
    loss.backward()
    plain(**other.shard(PACKED.batch())).loss.backward()
    found, wanted = gradients(model), gradients(plain)
    assert max(relative(found[name], wanted[name]) for name in wanted) < TOLERANCE
    assert not any(stash.usage.now.values()) and not stash._places


def test_a_removed_handle(run_ranks: RunRanks) -> None:
    run_ranks(1, removed)


def predicted(family: str, degrees: tuple[int, int], memory: Memory, dtype: torch.dtype) -> Any:
    """Return the bytes that tiers are chosen by, those that are put, and the storage that this takes after forward."""
    model = build(family, torch.float32 if dtype is torch.bfloat16 else dtype, layers=memory_layers(memory))
    told: list[int] = []
    put: list[int] = []
    real_assign, real_put, real_restore = Passage.assign, Stash.put, PrefixMixing._restore
    passing = False

    def restore(self: PrefixMixing, *args: Any) -> Any:
        nonlocal passing
        passing = True  # what a layer's backward makes and uses itself is not divided among layers
        restored = real_restore(self, *args)
        passing = False
        return restored

    def assign(self: Passage, sizes: Sequence[int]) -> Any:
        told.extend(sizes)
        return real_assign(self, sizes)

    def put_(self: Stash, tensors: Sequence[Tensor], tier: Any) -> Any:
        if not passing:
            put.append(sum(t.nbytes for t in tensors))
        return real_put(self, tensors, tier)

    handle = longspan.prepare(
        model, degrees[0] * degrees[1], ulysses_degree=degrees[0], ring_degree=degrees[1], memory=memory
    )
    patches = (Passage, "assign", assign), (Stash, "put", put_), (PrefixMixing, "_restore", restore)
    with ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patch.object(*patched))
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            loss = model(**handle.shard(RAGGED.batch())).loss
        taken = handle.stash.usage.now["gpu"], sum(put)
        loss.backward()
    return [n for n in told if n], [n for n in put if n], *taken


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)], ids=["one", "u2", "r2", "2x2", "u4"])
@pytest.mark.parametrize("family", ["llama", "llama-6-heads", "qwen3"])
def test_sizes_are_predicted(run_ranks: RunRanks, family: str, degrees: tuple[int, int]) -> None:
    world = degrees[0] * degrees[1]
    for keep, rebuilt in (("x+O+KV none O", "x+O"), ("x none none", "x+O+KV"), ("x+O none x", "O")):
        memory = Memory(5, tuple(Keep(k) for k in keep.split()), None, Keep(rebuilt))
        for dtype in (torch.float64, torch.bfloat16):
            results = run_ranks(world, predicted, family, degrees, memory, dtype)
            for told, put, storage, forward in results:
                assert len(told) == len(put) and all(a >= b for a, b in zip(told, put, strict=True))
                assert storage == forward
            assert results[0][0] == [max(sizes) for sizes in zip(*(put for _, put, _, _ in results), strict=True)]


def dropped(keep: str) -> tuple[float, bool]:
    """Return how far gradients with dropout are from those of layers that keep their own states, and whether the
    generator stands where it would."""
    found, states = [], []
    for decisions in ("x x x", keep):
        model = build("llama", layers=3)
        for layer in model.model.layers:
            layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(0.3))
        memory = Memory(5, tuple(Keep(k) for k in decisions.split()))
        handle = longspan.prepare(model, 2, ring_degree=2, memory=memory)
        torch.manual_seed(3)
        with wide():
            model(**handle.shard(PACKED.batch())).loss.backward()
        states.append(torch.get_rng_state())
        found.append(gradients(model))
    first, second = found
    return max(relative(second[name], first[name]) for name in first), torch.equal(*states)


@pytest.mark.parametrize("keep", ["x none none", "x+O O O", "x none O"])
def test_dropout_is_replayed_in_rebuilt_layers(run_ranks: RunRanks, keep: str) -> None:
    for error, stands in run_ranks(2, dropped, keep):
        assert error < TOLERANCE
        assert stands, "rebuilding moved the random numbers of what follows"


class _Skipping:
    """Injects a layer's attention output into the next one."""

    def __enter__(self) -> None:
        real = Segment._advance

        def wrong(self: Segment, position: int, x: Tensor, tier: Any) -> Tensor:
            real(self, position, x, tier)
            return x

        self.patch = patch.object(Segment, "_advance", wrong)
        self.patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.__exit__(None, None, None)


def mistaken() -> float:
    with _Skipping():
        return max(errors_of([memory_of("out", "gpu")], (1, 1), PACKED))


def test_a_mistake_is_seen(run_ranks: RunRanks) -> None:
    assert run_ranks(1, mistaken)[0] > TOLERANCE


def edited() -> None:
    """Hidden states that a layer has run on may not be written to while they are copied."""
    model, _, part = prepared("out after x", "host")
    seen: list[Tensor] = []
    model.model.layers[0].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    model.model.layers[1].register_forward_pre_hook(lambda m, args: setattr(m, "seen", seen[0].detach().mul_(1.5)))
    with pytest.raises(ModelError, match="changed in place"):
        model(**part)


def test_edits_while_copying_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(1, edited)


def test_a_chain_needs_a_start() -> None:
    with pytest.raises(ConfigError, match="Layer 1 keeps no hidden states"):
        Memory(4, (Keep.GRAPH, Keep.OUT))
    with pytest.raises(ConfigError, match="rebuilt cannot be 'graph'"):
        Memory(4, (Keep.X, Keep.NONE), rebuilt=Keep.GRAPH)
    with pytest.raises(ConfigError, match="rebuilt lists 1 decisions, the model has 2 layers"):
        longspan.prepare(build("llama"), 1, memory=Memory(4, (Keep.X, Keep.NONE), rebuilt=(Keep.X,)))

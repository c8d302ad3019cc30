"""Layers that run in tiles against one device: the loss and every gradient, in fp64, for every keep decision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import longspan
from dense import relative
from longspan.attention.ulysses import Ulysses
from longspan.errors import ConfigError, ModelError, TrainingError
from longspan.keep import Keep, Memory
from longspan.stream import prefix
from longspan.stream.function import StreamedLayer
from longspan.stream.gradients import Gradients
from longspan.stream.prefix import Prefix
from longspan.tiled import TiledFunction
from longspan.tiling import Ambient
from models import Rows, WideMode, build, gradients, one_device
from pool import RunRanks
from test_parity import Errors, compare, exact, worst

pytestmark = pytest.mark.dist

PACKED = Rows([[20, 1, 6, 14]])
RAGGED = Rows([[13, 4], [29], [1, 1, 8]])
KEEPS = {
    "x+O+KV": Keep.X_O_KV,
    "x+O": Keep.X_O,
    "x": Keep.X,
    "graph, x+O": (Keep.GRAPH, Keep.X_O),
    "x, none": (Keep.X, Keep.NONE),
    "x+O+KV, none": (Keep.X_O_KV, Keep.NONE),
}


@contextmanager
def wide() -> Iterator[None]:
    """Keep fp64 in what tiles compute again in backward too, where autograd drops function modes."""

    def widened(real: Any) -> Any:
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            with WideMode():
                return real(ctx, *gradients)

        return staticmethod(backward)

    with ExitStack() as patches:
        patches.enter_context(WideMode())
        for function in (StreamedLayer, TiledFunction):
            patches.enter_context(patch.object(function, "backward", widened(function.backward)))
        yield


def streamed_errors(
    family: str, degrees: tuple[int, int], rows: Rows, memory: Memory, change: str | None = None
) -> Errors:
    """Train one step with streamed layers, and return the relative errors of the loss and of each gradient."""
    model = build(family)
    ulysses, ring = degrees
    with wide(), {**MISTAKES, "small blocks": _SmallBlocks}[change]() if change else nullcontext():
        loss, wanted, _ = one_device(model, [rows])
        handle = longspan.prepare(model, ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, memory=memory)
        out = model(**handle.shard(rows.batch()))
        out.loss.backward()
        handle.reduce_gradients()
        found = relative(out.loss.detach(), torch.tensor(loss, dtype=torch.float64))
    return compare(model, wanted) | {"loss": found}


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)], ids=["one", "u2", "r2", "2x2", "u4"])
@pytest.mark.parametrize("keep", KEEPS)
def test_every_keep_decision_is_exact(run_ranks: RunRanks, degrees: tuple[int, int], keep: str) -> None:
    world = degrees[0] * degrees[1]
    for tile, rows in ((1, PACKED), (5, RAGGED), (1000, PACKED)):
        results = run_ranks(world, streamed_errors, "llama", degrees, rows, Memory(tile, KEEPS[keep]))
        assert exact(results), (tile, worst(results))


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "phi3", "qwen3-moe"])
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=["prefix", "whole"])
def test_families(run_ranks: RunRanks, family: str, degrees: tuple[int, int]) -> None:
    memory = Memory(4, (Keep.X, Keep.NONE))
    rows = Rows([[45]]) if family == "phi3" else RAGGED
    results = run_ranks(2, streamed_errors, family, degrees, rows, memory)
    assert exact(results), worst(results)


@pytest.mark.parametrize("keep", [Keep.PRODUCTS, Keep.X_O_KV, Keep.X_O, Keep.GRAPH])
def test_compiled_halves_are_exact(run_ranks: RunRanks, keep: Keep) -> None:
    """The eager backend traces what the others compile: the stop, the answer, and nothing left out."""
    for degrees in ((1, 1), (2, 1), (1, 2)):
        world = degrees[0] * degrees[1]
        results = run_ranks(world, streamed_errors, "llama", degrees, PACKED, Memory(5, keep, "eager"))
        assert exact(results), worst(results)


class _SmallBlocks:
    """Makes the keys of every call come in blocks of 7 tokens."""

    def __enter__(self) -> None:
        self.patch = patch.object(prefix, "KEY_BLOCK_TOKENS", 7)
        self.patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.__exit__(None, None, None)


@pytest.mark.parametrize("rows", [Rows([[41]]), PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("tile", [1, 5, 16])
def test_keys_in_blocks_are_exact(run_ranks: RunRanks, rows: Rows, tile: int) -> None:
    for degrees in ((1, 1), (2, 1)):
        memory = Memory(tile, Keep.X_O)
        results = run_ranks(degrees[0], streamed_errors, "llama", degrees, rows, memory, "small blocks")
        assert exact(results), worst(results)


class _Zeroed:
    """Loses the gradients of a tile's keys."""

    def __enter__(self) -> None:
        real = Prefix.backward

        def wrong(self: Prefix, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = real(self, *args)
            return dq, torch.zeros_like(dk), dv

        self.patch = patch.object(Prefix, "backward", wrong)
        self.patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.__exit__(None, None, None)


class _Ascending(_Zeroed):
    """Takes a tile's dk and dv before later tiles have added theirs."""

    def __enter__(self) -> None:
        real = Prefix.backward

        def wrong(self: Prefix, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            self.dk = self.dv = None
            return real(self, *args)

        self.patch = patch.object(Prefix, "backward", wrong)
        self.patch.__enter__()


class _Unshifted(_Zeroed):
    """Leaves out what the hidden states get through the projections."""

    def __enter__(self) -> None:
        real = Gradients.end

        def wrong(self: Gradients, at: Any, held: Any, part: Any) -> None:
            real(self, at, held, None)

        self.patch = patch.object(Gradients, "end", wrong)
        self.patch.__enter__()


class _Swapped(_Zeroed):
    """Hands back the query gradients of the other heads."""

    def __enter__(self) -> None:
        real = Ulysses.leave_gradients

        def wrong(self: Ulysses, dq: Tensor, dk: Tensor, dv: Tensor) -> Any:
            return real(self, dq.flip(2), dk, dv)

        self.patch = patch.object(Ulysses, "leave_gradients", wrong)
        self.patch.__enter__()


MISTAKES = {"zeroed": _Zeroed, "ascending": _Ascending, "unshifted": _Unshifted, "swapped": _Swapped}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(run_ranks: RunRanks, mistake: str) -> None:
    results = run_ranks(2, streamed_errors, "llama", (2, 1), PACKED, Memory(5, Keep.X_O), mistake)
    assert not exact(results)


def dropout_case(
    tile: int, keep: Keep, noise: Callable[[], torch.nn.Module] = lambda: torch.nn.Dropout(0.3)
) -> tuple[float, float]:
    """Return a directional derivative by finite differences and by backward, with dropout inside the layers."""
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, noise())
        layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, torch.nn.Dropout(0.2))
    backend = "eager" if keep is Keep.PRODUCTS else None  # layers with dropout run uncompiled all the same
    handle = longspan.prepare(model, 1, memory=Memory(tile, keep, backend))
    part = handle.shard(RAGGED.batch())
    direction = [
        torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).double()
        for i, p in enumerate(model.parameters())
    ]

    def loss(step: float) -> Tensor:
        if step:
            with torch.no_grad():
                for p, d in zip(model.parameters(), direction, strict=True):
                    p += step * d
        torch.manual_seed(7)
        value = model(**part).loss
        if step:
            with torch.no_grad():
                for p, d in zip(model.parameters(), direction, strict=True):
                    p -= step * d
        return value

    with wide():
        model.zero_grad()
        loss(0.0).backward()
        slope = sum(
            float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction, strict=True) if p.grad is not None
        )
        step = 1e-6
        return (float(loss(step)) - float(loss(-step))) / (2 * step), slope


@pytest.mark.parametrize("tile", [5, 1000])
@pytest.mark.parametrize("keep", [Keep.PRODUCTS, Keep.X_O_KV, Keep.X])
def test_dropout_is_replayed(run_ranks: RunRanks, tile: int, keep: Keep) -> None:
    ((numeric, slope),) = run_ranks(1, dropout_case, tile, keep)
    assert slope == pytest.approx(numeric, rel=1e-6)


def silent_failures() -> None:
    """Failures that would be silent, one after the other, on one process."""
    rows = PACKED
    model = build("llama")
    handle = longspan.prepare(model, 1, memory=Memory(8, (Keep.X_O, Keep.NONE)))
    part = handle.shard(rows.batch())
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: fired.append(name))
    loss = model(**part).loss
    loss.backward(retain_graph=True)
    assert sorted(fired) == sorted(n for n, _ in model.named_parameters()), "a parameter's hook runs once"
    with pytest.raises((TrainingError, RuntimeError)):
        loss.backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    model.zero_grad()
    twin_loss = twin(**part).loss
    twin_loss.backward()
    assert float(twin_loss) == pytest.approx(float(torch.tensor(37.0).log()), rel=1e-6), "a copy has its own weights"
    assert all(p.grad is None for p in model.parameters()), "a copy trains itself"
    with pytest.raises(ModelError, match="softcap"):
        _with_extra_kwarg(model)(**part)


def _with_extra_kwarg(model: Any) -> Any:
    attention = model.model.layers[0].self_attn
    real = attention.forward
    attention.forward = lambda *args, **kwargs: real(*args, **kwargs, softcap=50.0)
    return model


def test_silent_failures(run_ranks: RunRanks) -> None:
    run_ranks(1, silent_failures)


class _Noisy(torch.nn.Module):
    """Draws random numbers without being called a dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.3, self.training)


def noisy_case() -> None:
    """Noise that no module is named after is replayed in eager tiles, and refused in compiled ones."""
    numeric, slope = dropout_case(5, Keep.X_O, noise=_Noisy)
    assert slope == pytest.approx(numeric, rel=1e-6)
    model = build("llama")
    model.model.layers[0].mlp.down_proj = torch.nn.Sequential(model.model.layers[0].mlp.down_proj, _Noisy())
    handle = longspan.prepare(model, 1, memory=Memory(4, Keep.X_O, "eager"))
    with pytest.raises(ModelError, match="draws random numbers"):
        model(**handle.shard(PACKED.batch()))


def test_noise_without_a_name_is_replayed(run_ranks: RunRanks) -> None:
    run_ranks(1, noisy_case)


def autocast_case(keep: Keep, backend: str | None) -> float:
    """Return how far gradients under autocast are from those of layers that keep their graph."""
    found = []
    for memory in ("auto", Memory(8, keep, backend)):
        model = build("llama", torch.float32)
        handle = longspan.prepare(model, 1, memory=memory)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**handle.shard(Rows([[40]]).batch())).loss
        loss.backward()
        found.append(torch.cat([g.flatten() for g in gradients(model).values()]))
    return float((found[0] - found[1]).norm() / found[0].norm())


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("keep", [Keep.PRODUCTS, Keep.X_O_KV, Keep.X_O, Keep.X])
def test_autocast_is_kept(run_ranks: RunRanks, keep: Keep, backend: str | None) -> None:
    if keep is Keep.PRODUCTS and backend is None:
        return  # refused
    assert run_ranks(1, autocast_case, keep, backend)[0] < 0.02


def edited_case() -> None:
    """What is written to hidden states between layers that are rebuilt would be lost."""
    model = build("llama")
    model.model.layers[0].register_forward_hook(lambda module, args, out: out.mul_(1.5))
    handle = longspan.prepare(model, 1, memory=Memory(8, (Keep.X_O, Keep.NONE)))
    with pytest.raises(ModelError, match="not given what the layer before it returned"):
        model(**handle.shard(PACKED.batch()))


def test_edits_between_rebuilt_layers_are_refused(run_ranks: RunRanks) -> None:
    run_ranks(1, edited_case)


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("keep", [Keep.X_O, Keep.GRAPH])
def test_arguments_meant_for_attention_are_refused(run_ranks: RunRanks, keep: Keep, backend: str | None) -> None:
    if keep is not Keep.GRAPH or backend is not None:
        run_ranks(1, softcap_case, keep, backend)


def softcap_case(keep: Keep, backend: str | None) -> None:
    model = build("llama")
    handle = longspan.prepare(model, 1, memory=Memory(41, keep, backend))
    with pytest.raises(ModelError, match="softcap"):
        model(**handle.shard(PACKED.batch()), softcap=50.0)


def outer_checkpoint() -> int:
    """Count the attention outputs that stay alive when a checkpoint surrounds the streamed layers."""
    from torch.utils.checkpoint import checkpoint

    model = build("llama")
    wanted = copy.deepcopy(model)
    handle = longspan.prepare(model, 1, memory=Memory(8, Keep.X_O))
    part = handle.shard(PACKED.batch())
    loss = checkpoint(lambda: model(**part).loss, use_reentrant=False)
    loss.backward()
    other = longspan.prepare(wanted, 1)
    other_loss = wanted(**other.shard(PACKED.batch())).loss
    other_loss.backward()
    errors = [relative(a, b) for a, b in zip(gradients(model).values(), gradients(wanted).values(), strict=True)]
    return int(max(errors) > 1e-10)


def test_an_outer_checkpoint_is_exact(run_ranks: RunRanks) -> None:
    assert run_ranks(1, outer_checkpoint) == [0]


def test_decisions_may_be_named_and_are_checked() -> None:
    assert Memory(4, "x+O") == Memory(4, Keep.X_O)  # type: ignore[arg-type]
    assert Memory(4, ["x", "none"]).keep == (Keep.X, Keep.NONE)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nonsense"):
        Memory(4, "nonsense")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no effect"):
        Memory(4)
    with pytest.raises(ConfigError, match="needs compile"):
        Memory(4, Keep.PRODUCTS)
    with pytest.raises(ConfigError, match="compile needs tile_tokens"):
        Memory(None, Keep.X_O, "eager")
    with pytest.raises(ConfigError, match="3 decisions, the model has 2 layers"):
        longspan.prepare(build("llama"), 1, memory=Memory(4, (Keep.X, Keep.NONE, Keep.NONE)))


def test_fresh_generators_follow_every_generator() -> None:
    states = [torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)]
    seeds = set()
    for state in states:
        ambient = Ambient(torch.device("cpu"), None, (torch.get_rng_state(),)).reseeded(1)
        other = Ambient(torch.device("cpu"), None, (torch.get_rng_state() ^ state[:1],)).reseeded(1)
        seeds |= {bytes(ambient.rng[0].numpy()), bytes(other.rng[0].numpy())}
    assert len(seeds) == 2


def test_a_segment_needs_a_start() -> None:
    with pytest.raises(ConfigError, match="Layer 1 keeps nothing"):
        Memory(4, (Keep.GRAPH, Keep.NONE))
    with pytest.raises(ConfigError, match="tile_tokens"):
        Memory(0)

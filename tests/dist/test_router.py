"""The router's auxiliary loss, value and gradient, against one device's of the whole batch, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers.integrations import moe

import longspan
from dense import TOLERANCE, apart, relative
from longspan.check.float64 import float64_throughout
from longspan.errors import ModelError
from longspan.integrations.transformers import forward
from longspan.keep import Keep, Memory
from longspan.stream.gradients import Gradients
from longspan.stream.routing import Choices, TileRouting
from models import Rows, build
from pool import RunRanks
from steps import COEFFICIENT, Case, Errors, all_errors, gradients, make, truth_of

pytestmark = pytest.mark.dist

PADDED = Rows([[7, 4], [16], [1, 1, 5]], seed=2)
OTHER = Rows([[3], [12, 2]], seed=3)
WAYS = {
    "plain": Memory(),
    "x+O": Memory(3, Keep.X_O),
    "x, none": Memory(3, (Keep.X, Keep.NONE)),
    "graph, x+O+KV": Memory(100, (Keep.GRAPH, Keep.X_O_KV)),
}
DEGREES = {"one": (1, 1), "u2": (2, 1), "r2": (1, 2), "r3": (1, 3), "2x2": (2, 2)}


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_loss_and_gradients_equal_one_device(run_ranks: RunRanks, family: str, degrees: str) -> None:
    cases = [Case(family, DEGREES[degrees], memory, batch="packed") for memory in WAYS.values()]
    for wrong in run_ranks(DEGREES[degrees][0] * DEGREES[degrees][1], all_errors, cases):
        assert not wrong


def accumulated(memory: Memory, ring: int, reduction: str, counted: bool, mistake: str | None = None) -> Errors:
    """Train on two micro-batches of each data rank, of unlike lengths, with padding."""
    steps = [(PADDED, OTHER), (OTHER, PADDED)] if dist.get_world_size() > ring else [(PADDED,), (OTHER,)]
    steps = steps if counted else steps[:1]
    with float64_throughout(), MISTAKES[mistake]() if mistake else nullcontext():
        model = make("qwen3-moe")
        truth = truth_of(model, steps)
        handle = longspan.prepare(model, ring, ring_degree=ring, grad_reduction=reduction, memory=memory)  # type: ignore[arg-type]
        items = sum(rows.targets() for step in steps for rows in step) if counted else None
        loss = 0.0
        for step in steps:
            out = model(**handle.shard(step[handle.mesh.data.rank].batch(), num_items=items))
            out.loss.backward()
            loss += float(out.loss.detach())
        handle.reduce_gradients()
    errors = {name: relative(g, truth.gradients[name]) for name, g in gradients(model).items()}
    return errors | {"loss": apart(loss, truth.loss), "aux": apart(float(out.aux_loss.detach()), truth.auxiliary)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("world", "ring"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_padding_data_ranks_and_accumulation(run_ranks: RunRanks, world: int, ring: int, way: str) -> None:
    for counted, reduction in ((True, "mean"), (False, "sum")):
        for errors in run_ranks(world, accumulated, WAYS[way], ring, reduction, counted):
            assert all(error <= TOLERANCE for error in errors.values()), errors


@contextmanager
def _undifferentiated() -> Iterator[None]:
    real = Gradients.of
    with patch.object(
        Gradients, "of", lambda self, at: [real(self, at)[0], *map(torch.zeros_like, real(self, at)[1:])]
    ):
        yield


@contextmanager
def _local() -> Iterator[None]:
    """Count this rank's tokens only."""
    with patch.object(dist, "all_reduce", lambda t, *a, _real=dist.all_reduce, **k: t.dim() or _real(t, *a, **k)):
        yield


@contextmanager
def _padding() -> Iterator[None]:
    with patch.object(forward, "real_tokens", lambda shard, device: None):
        yield


@contextmanager
def _twice() -> Iterator[None]:
    """Count a tile again when its layer is rebuilt."""
    real = TileRouting.add

    def add(self: TileRouting, choices: Choices | None) -> None:
        self.counting = True
        real(self, choices)
        real(self, choices)

    with patch.object(TileRouting, "add", add):
        yield


MISTAKES = {"undifferentiated": _undifferentiated, "local": _local, "padding": _padding, "twice": _twice}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(run_ranks: RunRanks, mistake: str) -> None:
    memory = Memory(3, (Keep.GRAPH, Keep.X)) if mistake == "twice" else WAYS["x, none"]
    for errors in run_ranks(2, accumulated, memory, 2, "mean", True, mistake):
        assert max(errors.values()) > 1e-3
        assert mistake != "undifferentiated" or errors["aux"] <= TOLERANCE, "the value alone shows nothing"


def compiled_case(keep: Any, tile: int, experts: str) -> Errors:
    """Train one step with compiled halves and experts that can be traced."""
    with patch.object(moe, "_can_use_grouped_mm", lambda *args, **kwargs: False):  # it knows no fp64
        return _experts(experts, Memory(tile, keep, "eager"))


def _experts(experts: str, memory: Memory) -> Errors:
    with float64_throughout():
        model = make("qwen3-moe")
        truth = truth_of(model, [[PADDED]])
        model.set_experts_implementation(experts)
        handle = longspan.prepare(model, dist.get_world_size(), memory=memory)
        out = model(**handle.shard(PADDED.batch()))
        out.loss.backward()
        handle.reduce_gradients()
    errors = {name: relative(g, truth.gradients[name]) for name, g in gradients(model).items()}
    return errors | {"loss": apart(float(out.loss.detach()), truth.loss)}


@pytest.mark.parametrize(("experts", "world"), [("grouped_mm", 2), ("batched_mm", 1)])
def test_compiled_layers_with_experts(run_ranks: RunRanks, experts: str, world: int) -> None:
    if experts == "grouped_mm" and not hasattr(moe, "_grouped_mm_fallback_backward_fake"):
        pytest.skip("in fp64 this transformers replaces grouped_mm by what cannot be traced")
    tiles = ((Keep.PRODUCTS, 4), ((Keep.X, Keep.NONE), 4), (Keep.GRAPH, 16 // world))
    for keep, tile in tiles:
        for errors in run_ranks(world, compiled_case, keep, tile, experts):
            assert all(error <= TOLERANCE for error in errors.values()), (keep, errors)


def choices_case(experts: str, keep: Any, autocast: bool) -> None:
    """Every expert choice of the forward pass is made again in backward, and no other."""
    model = build("qwen3-moe", torch.float32, layers=3)
    model.set_experts_implementation(experts)
    made: list[tuple[int, bytes]] = []
    for i, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda m, a, out, i=i: made.append((i, out[2].numpy().tobytes())))
    handle = longspan.prepare(model, 1, memory=Memory(5, keep))
    made.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**handle.shard(PADDED.batch())).loss
    first = [made[i : i + 4] for i in range(0, len(made), 4)]  # four tiles a layer
    assert len(first) == 3
    made.clear()
    loss.backward()
    assert {c for tiles in first for c in tiles} == set(made)
    again = [c for c in made if c[0] == 2]
    assert again[-4:][::-1] == first[2], "the last layer's tiles, in descending order"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts_are_chosen_alike_in_every_run(run_ranks: RunRanks, experts: str, autocast: bool) -> None:
    for keep in (Keep.X_O, (Keep.X, Keep.NONE, Keep.NONE)):
        run_ranks(1, choices_case, experts, keep, autocast)


def router_logits(family: str, ring: int, memory: Memory) -> Errors:
    """Gather what the gates of a divided, packed, padded batch return; compare with each document alone."""
    with float64_throughout():
        model = make(family)
        plain = copy.deepcopy(model)
        handle = longspan.prepare(model, 2, ring_degree=ring, memory=memory)
        part = handle.shard(PADDED.batch())
        out = model(**part, output_router_logits=True)
        assert all(layer.shape == (*part["input_ids"].shape, model.num_experts) for layer in out.router_logits)
        with pytest.raises(ModelError, match="no way back to the layers: detach them"):
            (out.loss + out.router_logits[0].sum()).backward()
        full = [handle.gather(layer.detach(), part) for layer in out.router_logits]
        if find_spec("accelerate"):
            from longspan.integrations.trainer.model import FullBatch

            for_trainer = FullBatch(handle, ())(**PADDED.batch(), output_router_logits=True).router_logits
            assert all(map(torch.equal, for_trainer, (layer.flatten(0, 1) for layer in full)))
        alone = [plain(input_ids=ids[None], use_cache=False).router_logits for ids, _ in PADDED.alone()]
        wanted = [torch.cat(layer).detach() for layer in zip(*alone, strict=True)]
    real = torch.arange(full[0].shape[1]) < torch.tensor([sum(row) for row in PADDED.documents])[:, None]
    assert len(full) == len(wanted) == 2 and not any(layer[~real].any() for layer in full)
    return {str(i): relative(layer[real], wanted[i]) for i, layer in enumerate(full)}


@pytest.mark.parametrize("way", [*WAYS, "compiled"])
@pytest.mark.parametrize("ring", [1, 2])
def test_router_logits_are_those_of_one_device(run_ranks: RunRanks, ring: int, way: str) -> None:
    memory = WAYS.get(way, Memory(3, Keep.X_O, "eager"))
    for family in ("qwen3-moe", "mixtral") if way == "x+O" else ("qwen3-moe",):
        for errors in run_ranks(2, router_logits, family, ring, memory):
            assert all(error <= TOLERANCE for error in errors.values()), errors


def borders_case() -> None:
    """What surrounds the auxiliary loss: transformers' own recorder, arguments, copies, removal, refusals."""
    batch = {"input_ids": torch.arange(1, 13)[None], "labels": torch.arange(1, 13)[None]}
    with float64_throughout():
        model = make("qwen3-moe")
        plain = model(**batch)
        handle = longspan.prepare(model, 1, memory=Memory(5, Keep.X_O))
        with handle.bypass():
            assert len(model(**batch).router_logits) == 2, "transformers records by itself"
        part = handle.shard(batch)
        out = model(**part)
        assert apart(float(out.loss), float(plain.loss)) < TOLERANCE
        assert out.router_logits is None, "the config asks for the loss alone"
        hooks = [len(gate._forward_hooks) for gate in handle.routers.gates]
        assert len(model(**part, output_router_logits=True).router_logits) == 2
        assert [len(gate._forward_hooks) for gate in handle.routers.gates] == hooks
        assert apart(float(out.aux_loss), float(plain.aux_loss)) < TOLERANCE
        off = model(**part, output_router_logits=False)
        assert apart(float(out.loss - COEFFICIENT * out.aux_loss), float(off.loss)) < TOLERANCE
        assert off.aux_loss is None
        model.eval()
        with torch.no_grad():
            assert apart(float(model(**part).loss), float(plain.loss)) < TOLERANCE
        assert handle.token_logps(part).shape == (1, 12)
        twin = copy.deepcopy(model).train()
        twin_loss = twin(**part).loss
        twin_loss.backward()
        assert all(p.grad is None for p in model.parameters())
        gate = twin.model.layers[0].mlp.gate
        twin.model.layers[0].mlp.gate = type(gate)(twin.config).double()
        with pytest.raises(ModelError, match="1 gates ran in a model that has 2"):
            twin(**part)
        twin.config.output_router_logits = False
        with pytest.raises(ModelError, match="A gate did not see each of 12 tokens once"):
            twin._longspan_applied.token_logps({**part, "output_router_logits": True})
        twin._longspan_applied.remove()
        assert handle.routers.router is not None and handle.routers.router.tap.gates(model) == 2
        handle.remove()
        for each in (model, twin):
            assert not any("Tap" in type(hook).__name__ for m in each.modules() for hook in m._forward_hooks.values())
        out = longspan.prepare(model, 1, logits=True)
        unlabelled = model(**out.shard({"input_ids": batch["input_ids"]}))
        assert unlabelled.loss is None and apart(float(unlabelled.aux_loss), float(plain.aux_loss)) < TOLERANCE


def test_around_the_auxiliary_loss(run_ranks: RunRanks) -> None:
    run_ranks(1, borders_case)

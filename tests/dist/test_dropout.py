"""Ranks of a sequence share a seed and drop different elements of their tokens; nobody else's numbers move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan.keep import Keep, Memory
from models import Rows, build
from pool import RunRanks
from test_stream import wide

pytestmark = pytest.mark.dist

ROWS = Rows([[24]])  # of equal tokens, so that masks alone tell ranks apart
MEMORIES = {"plain": Memory(), "x": Memory(None, Keep.X), "x+O": Memory(None, Keep.X_O), "tiles": Memory(5, Keep.X)}


def dropping(p: float) -> Any:
    """Return a model with dropout behind each MLP."""
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Dropout(p))
    return model


def batch() -> dict[str, Tensor]:
    ids = torch.full((1, 24), 3)
    return {"input_ids": ids, "labels": ids}


def masks(ring: int, memory: Memory) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return what was dropped in two passes, the generator's state after them, and gradients of the second."""
    with wide():
        model = dropping(0.5)
        handle = longspan.prepare(model, 2, ring_degree=ring, memory=memory)
        seen: list[Tensor] = []
        for layer in model.model.layers:
            layer.mlp.down_proj[1].register_forward_hook(lambda module, args, out: seen.append(out == 0))
        torch.manual_seed(5)
        for _ in range(2):
            model.zero_grad()
            count = len(seen)
            loss = model(**handle.shard(batch())).loss
            forward = torch.cat([mask.flatten() for mask in seen[count:]])
            loss.backward()
            del seen[count:]
            seen.append(forward)
        handle.reduce_gradients()
    return seen, torch.get_rng_state(), [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("ring", [1, 2])
def test_ranks_drop_different_elements(run_ranks: RunRanks, ring: int) -> None:
    plain = run_ranks(2, masks, ring, MEMORIES["plain"])
    for name, memory in MEMORIES.items():
        (first, state, _gradients), (second, other, _) = found = run_ranks(2, masks, ring, memory)
        for one, two in zip(first, second, strict=True):  # whole-mode layers run tiles twice before they are finished
            assert 0.3 < float((one != two[: len(one)]).double().mean()) < 0.7, name
        assert 0.3 < float((first[0] != first[1]).double().mean()) < 0.7, "another pass, other elements"
        assert torch.equal(state, other), "the caller's numbers move alike on all ranks"
        if name in ("x", "x+O"):  # of one tile: layers run again drop what the plain ones drop
            for (_, _, some), (_, _, wanted) in zip(found, plain, strict=True):
                assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(some, wanted, strict=True))


def untouched(size: int, p: float, training: bool) -> bool:
    model = dropping(p).train(training)
    handle = longspan.prepare(model, size)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model(**handle.shard(batch()))
    return torch.equal(torch.get_rng_state(), state)


def test_without_dropout_no_generator_moves(run_ranks: RunRanks) -> None:
    assert run_ranks(2, untouched, 2, 0.0, True) == [True, True]
    assert run_ranks(2, untouched, 2, 0.5, False) == [True, True]
    assert run_ranks(2, untouched, 2, 0.5, True) == [False, False]


def as_before() -> tuple[Tensor, Tensor]:
    """Return the loss of one process, prepared and not, from the same seed."""
    losses = []
    for prepared in (False, True):
        model = dropping(0.5)
        given: Any = batch()
        if prepared:
            given = longspan.prepare(model, 1, memory=Memory()).shard(given)
        torch.manual_seed(5)
        losses.append(model(**given).loss.detach())
    return losses[0], losses[1]


def test_one_process_draws_as_the_plain_model(run_ranks: RunRanks) -> None:
    ((plain, prepared),) = run_ranks(1, as_before)
    assert abs(float(plain) - float(prepared)) < 1e-6

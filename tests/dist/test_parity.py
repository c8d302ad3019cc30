"""Prepared models against one device: the loss and every gradient, in fp64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import longspan
from dense import TOLERANCE, apart, relative
from longspan.batch import IGNORE_INDEX, Shard
from longspan.integrations.transformers import Applied
from models import MIXED_HEADS, Rows, WideMode, build, gradients, one_device
from pool import RunRanks

pytestmark = pytest.mark.dist

Errors = dict[str, float]

PACKED = Rows([[20, 1, 6, 14]])
RAGGED = Rows([[13, 4], [29], [1, 1, 8]])
LONG = Rows([[63]])


@dataclass(frozen=True)
class Setup:
    """How a model is prepared, and trained for one step.

    Args:
        steps: micro-batches of each data rank.
        counted: whether `num_items` is given.
        size: sequence-parallel ranks, where not both degrees are set.
    """

    family: str
    ulysses: int | None
    ring: int | None
    steps: Sequence[Sequence[Rows]]
    counted: bool = False
    grad_reduction: str = "mean"
    size: int | None = None

    @property
    def ranks(self) -> int:
        return self.size or (self.ulysses or 1) * (self.ring or 1)


def step_errors(setup: Setup, mistake: str | None = None) -> Errors:
    """Train one step, and return the relative errors of the loss and of each gradient."""
    model = build(setup.family)
    told = 0.0
    with WideMode(), MISTAKES[mistake]() if mistake else nullcontext():
        loss, wanted, targets = one_device(model, [rows for steps in setup.steps for rows in steps])
        handle = longspan.prepare(
            model,
            setup.ranks,
            ulysses_degree=setup.ulysses,
            ring_degree=setup.ring,
            grad_reduction=setup.grad_reduction,  # type: ignore[arg-type]
        )
        for rows in setup.steps[handle.mesh.data.rank]:
            out = model(**handle.shard(rows.batch(), num_items=targets if setup.counted else None))
            out.loss.backward()
            told += float(out.loss.detach())
        if mistake != "unreduced":
            handle.reduce_gradients()
    return compare(model, wanted) | {"loss": apart(told, loss)}


def compare(model: torch.nn.Module, wanted: dict[str, Tensor]) -> Errors:
    found = gradients(model)
    assert found.keys() == wanted.keys()
    assert all(float(g.abs().max()) > 1e-4 for g in wanted.values()), "the truth has no gradient that is worth a test"
    return {name: relative(found[name], wanted[name]) for name in wanted}


def exact(results: Sequence[Errors]) -> bool:
    return all(error <= TOLERANCE for errors in results for error in errors.values())


def worst(results: Sequence[Errors]) -> dict[str, float]:
    return {name: max(errors[name] for errors in results) for name in results[0]}


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "phi3", "qwen3-moe"])
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (2, 2), (4, 1)], ids=["ring2", "2x2", "ulysses4"])
def test_loss_and_gradients_equal_one_device(run_ranks: RunRanks, family: str, ulysses: int, ring: int) -> None:
    for rows in [LONG] if family == "phi3" else [PACKED, RAGGED]:
        results = run_ranks(ulysses * ring, step_errors, Setup(family, ulysses, ring, [[rows]]))
        assert exact(results), worst(results)


@pytest.mark.parametrize("family", ["phi3", "llama-dynamic"])
def test_tables_that_adapt_to_the_length_go_by_the_whole_batch(run_ranks: RunRanks, family: str) -> None:
    """One rank of the ring sees positions below the border only, and must use the frequencies of long rows as well."""
    for tokens in (32, 33, 40):
        results = run_ranks(2, step_errors, Setup(family, 1, 2, [[Rows([[tokens]])]]))
        assert exact(results), (tokens, worst(results))


@pytest.mark.parametrize(("ulysses", "ring"), [(3, 1), (1, 3)], ids=["ulysses3", "ring3"])
def test_three_ranks(run_ranks: RunRanks, ulysses: int, ring: int) -> None:
    results = run_ranks(3, step_errors, Setup("qwen2", ulysses, ring, [[RAGGED]]))
    assert exact(results), worst(results)


@pytest.mark.parametrize("ulysses", [None, 1, 4], ids=["automatic", "ring", "uneven"])
def test_layers_may_differ_in_their_heads(run_ranks: RunRanks, ulysses: int | None) -> None:
    """Of 4 and 6 query heads, automatic degrees take what divides both."""
    results = run_ranks(4, step_errors, Setup(MIXED_HEADS, ulysses, None, [[PACKED]], size=4))
    assert exact(results), worst(results)


def test_data_parallel_ranks_alone(run_ranks: RunRanks) -> None:
    steps = [[PACKED], [RAGGED], [Rows([[9]], untargeted=[0])], [Rows([[3, 5]], seed=1)]]
    results = run_ranks(4, step_errors, Setup("llama", 1, 1, steps))
    assert exact(results), worst(results)


UNEVEN = [
    [Rows([[20, 3]]), Rows([[5, 9, 30]], seed=1), Rows([[11]], seed=2)],
    [Rows([[40]], seed=3), Rows([[7, 7]], untargeted=[0], seed=4), Rows([[2], [9]], seed=5)],
]


@pytest.mark.parametrize("grad_reduction", ["mean", "sum"])
def test_data_parallel_accumulation_of_uneven_micro_batches(run_ranks: RunRanks, grad_reduction: str) -> None:
    """Two data ranks of two, three micro-batches each, one of them without any target."""
    setup = Setup("llama", 2, 1, UNEVEN, counted=True, grad_reduction=grad_reduction)
    results = run_ranks(4, step_errors, setup)
    assert exact(results), worst(results)


@pytest.mark.parametrize("grad_reduction", ["mean", "sum"])
@pytest.mark.parametrize("counted", [True, False])
def test_data_ranks_with_different_batches(run_ranks: RunRanks, counted: bool, grad_reduction: str) -> None:
    for steps in ([[Rows([[30, 2]])], [Rows([[5], [13]], seed=1)]], [[PACKED], [Rows([[9]], untargeted=[0])]]):
        setup = Setup("qwen2", 1, 2, steps, counted=counted, grad_reduction=grad_reduction)
        results = run_ranks(4, step_errors, setup)
        assert exact(results), worst(results)


@pytest.mark.parametrize("documents", [[4], [1, 4], [3, 2], [9, 1, 1]])
def test_ranks_without_any_target_or_any_token(run_ranks: RunRanks, documents: list[int]) -> None:
    """Rows so short that some ranks hold nothing but padding, or nothing but last tokens."""
    results = run_ranks(4, step_errors, Setup("llama", 1, 4, [[Rows([documents])]]))
    assert exact(results), worst(results)


def no_targets_at_all() -> tuple[float, float]:
    model = build("llama")
    handle = longspan.prepare(model, 2)
    out = model(**handle.shard(Rows([[9]], untargeted=[0]).batch()))
    out.loss.backward()
    handle.reduce_gradients()
    return float(out.loss.detach()), max(float(g.abs().max()) for g in gradients(model).values())


def test_a_batch_without_any_target_gives_zero_and_no_nan(run_ranks: RunRanks) -> None:
    assert run_ranks(2, no_targets_at_all) == [(0.0, 0.0)] * 2


def loss_times_sp() -> Any:
    right = Applied.reduce_gradients

    def reduce(self: Applied) -> None:
        right(self)
        for parameter in self.model.parameters():
            parameter.grad *= self.mesh.sequence.size  # type: ignore[operator]

    return patch.object(Applied, "reduce_gradients", reduce)


def local_positions() -> Any:
    """Let each rank count its own tokens from 0."""
    right = longspan.integrations.transformers.applied.shard_batch

    def shard(*args: Any, **kwargs: Any) -> dict[str, Any]:
        part = right(*args, **kwargs)
        return part | {"position_ids": torch.arange(part["position_ids"].shape[1]).expand_as(part["position_ids"])}

    return patch.object(longspan.integrations.transformers.applied, "shard_batch", shard)


def local_labels() -> Any:
    """Drop the target of each part's last token, as a shift after cutting does."""
    right = Shard.cut

    def cut(self: Shard, field: Tensor, fill: int | float = 0) -> Tensor:
        part = right(self, field, fill).clone()
        if fill == IGNORE_INDEX:
            part[:, -1] = IGNORE_INDEX
        return part

    return patch.object(Shard, "cut", cut)


def forgotten_borders() -> Any:
    return patch.object(longspan.Mask, "packed", False)


MISTAKES: dict[str, Any] = {
    "unreduced": nullcontext,
    "times-sp": loss_times_sp,
    "local-positions": local_positions,
    "local-labels": local_labels,
    "forgotten-borders": forgotten_borders,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_goes_red_for(run_ranks: RunRanks, mistake: str) -> None:
    setup = Setup("llama", 2, 1, [[Rows([[41, 20]])]])
    assert exact(run_ranks(2, step_errors, setup))
    assert not exact(run_ranks(2, step_errors, setup, mistake))


def fp32_islands() -> float:
    """Compare without lifting the model's own fp32 arithmetic: the reason why the other tests lift it."""
    model = build("llama")
    plain = copy.deepcopy(model)
    batch = LONG.batch()
    plain(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False).loss.backward()
    handle = longspan.prepare(model, 2)
    model(**handle.shard(batch)).loss.backward()
    handle.reduce_gradients()
    return max(compare(model, gradients(plain)).values())


def test_without_lifting_the_models_fp32_islands_parity_ends_at_fp32(run_ranks: RunRanks) -> None:
    assert all(TOLERANCE < error < 1e-5 for error in run_ranks(2, fp32_islands))

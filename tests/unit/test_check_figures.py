"""The check's own arithmetic: what counts as an error, what may move, and what the plain model is shown."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.check.compare import (
    BFLOAT16,
    EXACT,
    FLOAT64,
    Case,
    Moves,
    baseline,
    faults,
    gradient_error,
    limits_from,
    moves,
    relative,
)
from longspan.check.float64 import float64_throughout
from longspan.check.reference import Truth, truth_of
from longspan.check.samples import IGNORED, Document, samples
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import random_model, reach_tokens

CPU = torch.device("cpu")
GOOD = Case("document 2x1", 2, 1, 1e-16, 1e-15, 0, 0.0, "norm")


def test_gradients_are_compared_parameter_by_parameter() -> None:
    truth = {"big": torch.full((4,), 3.0).double(), "small": torch.tensor([1e-3]).double(), "idle": torch.zeros(2)}
    same = {name: g.clone() for name, g in truth.items()}
    assert gradient_error(same, truth, 1e-6) == (0.0, "")
    assert gradient_error({**same, "small": truth["small"] * 1.5}, truth, 1e-6) == (pytest.approx(0.5), "small")
    assert gradient_error({k: v for k, v in same.items() if k != "small"}, truth, 1e-6) == (pytest.approx(1), "small")
    assert gradient_error({k: v for k, v in same.items() if k != "idle"}, truth, 1e-6) == (0.0, "")
    assert gradient_error({**same, "idle": torch.tensor([0.0, 1e-30])}, truth, 1e-6) == (math.inf, "idle")
    assert gradient_error({**same, "big": torch.full((4,), math.nan)}, truth, 1e-6) == (math.inf, "big")
    assert gradient_error({**same, "new": torch.ones(1)}, truth, 1e-6) == (math.inf, "new")


def test_a_gradient_that_cancels_is_measured_against_all_of_them() -> None:
    truth = {"big": torch.ones(1).double(), "cancels": torch.tensor([1e-17]).double()}
    noise = {**truth, "cancels": torch.tensor([-3e-17]).double()}
    error, where = gradient_error(noise, truth, FLOAT64.negligible)
    assert where == "cancels"
    assert error < EXACT.grad


def test_relative() -> None:
    assert relative(0.0, 0.0) == 0.0
    assert relative(1.0, 0.0) == math.inf
    assert relative(1.5, -1.0) == 2.5
    assert math.isnan(relative(math.nan, 1.0))


@pytest.mark.parametrize(
    ("wrong", "followed", "told"),
    [
        ({}, 1.0, ""),
        ({"loss_rel_err": 2e-9}, 1.0, "loss_rel_err 2e-09 exceeds 1e-09"),
        ({"grad_rel_err": 2e-8}, 1.0, "grad_rel_err 2e-08 exceeds 1e-08"),
        ({"grad_rel_err": math.inf}, 1.0, "grad_rel_err inf"),
        ({"loss_rel_err": math.nan}, 1.0, "loss_rel_err nan"),
        ({"eval_rel_err": 1.0}, 1.0, "eval_rel_err 1 "),
        ({"leak": 1}, 1.0, "leak 1 exceeds 0"),
        ({}, 0.99, "only 99% of a document's later tokens"),
    ],
)
def test_faults(wrong: dict[str, float], followed: float, told: str) -> None:
    case = replace(GOOD, **wrong)
    why = faults(case, EXACT, followed, FLOAT64)
    assert [told in line for line in why] == ([True] if told else [])
    json = replace(case, why=why).to_json()
    assert json["ok"] is (not told)
    assert all(not isinstance(v, float) or math.isfinite(v) for v in json.values())


def test_the_plain_models_own_error_sets_the_limits_in_bfloat16() -> None:
    truth = Truth(torch.tensor([1.0, 3.0]), {"w": torch.tensor([1.0, 0.0])})
    plain = Truth(torch.tensor([1.1, 2.9]), {"w": torch.tensor([1.0, 0.1])})
    own = baseline(plain, truth, BFLOAT16.negligible)
    assert own.loss == pytest.approx(0.05)  # not 0, although the mean losses agree
    assert own.grad == pytest.approx(0.1)
    limits = limits_from(own)
    assert (limits.loss, limits.grad, limits.eval) == pytest.approx((0.1, 0.2, 0.1))


@pytest.mark.parametrize(
    ("moved", "tolerance", "leaked", "followed"),
    [
        ([2, 3], 0.0, 0, 1.0),
        ([2], 0.0, 0, 0.5),
        ([3], 0.0, 0, 0.0),  # the changed token itself stayed
        ([1, 2, 3], 0.0, 1, 1.0),  # an earlier token
        ([2, 3, 4, 5], 0.0, 2, 1.0),  # the next document
        ([2, 3, 4], 2.0, 0, 0.0),
    ],
)
def test_moves_tell_leaks_from_what_must_move(moved: list[int], tolerance: float, leaked: int, followed: float) -> None:
    before = torch.zeros(1, 6, 2)
    after = before.clone()
    after[0, moved, 0] = 1.0
    assert moves(before, after, Document(0, 1, 4), 2, tolerance) == Moves(leaked, followed)


@pytest.mark.parametrize(
    ("moved", "reach", "leaked", "followed"),
    [([2, 3], 1, 0, 1.0), ([2, 3, 4], 1, 2, 1.0), ([2], 1, 0, 0.5), ([2], 0, 0, 1.0), ([2, 3, 4, 5], 9, 2, 1.0)],
)
def test_windows_end_what_a_token_moves(moved: list[int], reach: int, leaked: int, followed: float) -> None:
    after = torch.zeros(1, 6, 2)
    after[0, moved] = 1.0
    assert moves(torch.zeros(1, 6, 2), after, Document(0, 1, 5), 2, 0.0, reach) == Moves(leaked, followed)


def test_the_reach_of_windows_is_that_of_all_layers() -> None:
    assert reach_tokens(preset_config("tiny-mistral")) == 2 * 23
    assert reach_tokens(preset_config("tiny-mistral", sliding_window=None)) is None
    assert reach_tokens(preset_config("tiny-gemma2")) is None


@pytest.mark.parametrize("packed_only", [False, True])
@pytest.mark.parametrize("tokens", [4, 5, 13, 87, 1000])
def test_samples_cover_their_rows(tokens: int, packed_only: bool) -> None:
    made = samples(tokens, 384, packed_only)
    assert len(made) == 2 + (not packed_only)
    for sample in made:
        ids, labels = sample.ids, sample.batch["labels"]
        real = sample.batch.get("attention_mask", torch.ones_like(ids)).bool()
        covered = torch.zeros_like(ids)
        for d in sample.documents:
            covered[d.row, d.start : d.stop] += 1
        assert torch.equal(covered, real.long())
        assert bool((labels[~real] == IGNORED).all())
        assert 0 < sample.targets < ids.numel()
        for document in sample.probed():
            batch, at = sample.changed(document, 384)
            assert (batch["input_ids"] != ids).nonzero().tolist() == [[document.row, at]]
            assert document.start <= at < document.stop


def test_packed_samples_are_awkward() -> None:
    packed = samples(167, 384, True)[0]
    lengths = [len(document) for document in packed.documents]
    assert lengths.count(1) == 2
    assert max(lengths) > 167 / 4  # over several of four ranks
    assert any(bool((packed.labels(d) == IGNORED).all()) for d in packed.documents)


def test_float64_reaches_what_libraries_compute_in_float32() -> None:
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            seen.append(x.to(torch.float32).dtype)
            return x.clone()

        @staticmethod
        def backward(ctx: object, dx: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(dx.float().dtype)
            return dx

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
            with torch.enable_grad():
                leaf = ctx.saved_tensors[0].detach().requires_grad_()
                return torch.autograd.grad(Spy.apply(leaf), leaf, dx)[0]

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with float64_throughout():
        Spy.apply(x).sum().backward()
        torch.autograd.backward(Nested.apply(x).sum())
        (dx,) = torch.autograd.grad(Spy.apply(x), x, torch.ones_like(x))
        seen += [torch.zeros(1).dtype, torch.softmax(x, 0, dtype=torch.float32).dtype]
    assert seen == [torch.float64] * 8
    assert torch.equal(dx, torch.ones_like(x))
    assert torch.zeros(1).dtype == x.detach().float().dtype == torch.float32


def test_without_it_gradients_would_agree_to_seven_digits_only() -> None:
    sample = samples(40, 384, True)[0]
    model = random_model(preset_config("tiny-llama"), torch.float64, CPU)
    twice = replace(sample, documents=sample.documents * 2)  # the same mean, each gradient in two halves

    def error() -> float:
        truth = truth_of(model, sample, shows_length=False)
        return gradient_error(truth_of(model, twice, shows_length=False).gradients, truth.gradients, 1e-6)[0]

    rounded = error()
    with float64_throughout():
        exact = error()
    assert exact < 1e-13
    assert rounded < 1e-5


def test_the_plain_model_is_shown_the_batchs_length() -> None:
    sample = samples(167, 384, True)[0]
    assert sample.largest_position == 74
    with float64_throughout():
        model = random_model(preset_config("tiny-phi3"), torch.float64, CPU)
        shown, alone = (truth_of(model, sample, shows_length) for shows_length in (True, False))
    short = [i for i, d in enumerate(sample.documents) if len(d) < 64]
    assert short
    assert relative(alone.loss, shown.loss) > 1e-4

"""Experts that see no token on some rank, in every implementation of transformers, and routers with a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers.integrations import moe

import longspan
from dense import TOLERANCE, apart, relative
from longspan.check.float64 import float64_throughout
from longspan.engines import build_engine
from longspan.errors import ModelError
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import random_model
from longspan.keep import Keep, Memory
from models import Rows
from pool import RunRanks
from steps import Errors, gradients, truth_of

pytestmark = pytest.mark.dist

FEW = Rows([[7], [4, 2]])
BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
EXPERTS = 9
MANY: dict[str, dict[str, Any]] = {
    "tiny-moe": BALANCED | {"num_experts": EXPERTS, "num_experts_per_tok": 1},
    "tiny-mixtral": BALANCED | {"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "sliding_window": None},
    "tiny-deepseek-v3": {"n_routed_experts": EXPERTS, "n_group": 3, "num_experts_per_tok": 1, "n_shared_experts": 1},
}

WAYS = {"graph": Memory(), "tiles": Memory(1, (Keep.X, Keep.NONE))}


@dataclass(frozen=True)
class Starved:
    preset: str
    experts: str
    engine: str
    way: str


def starved_errors(case: Starved) -> Errors:
    """Train one step on rows so short that most experts get nothing on a rank, and return the errors."""
    with float64_throughout(), patch.object(moe, "_can_use_grouped_mm", lambda *args, **kwargs: False):
        model = random_model(preset_config(case.preset, **MANY[case.preset]), torch.float64, torch.device("cpu"))
        truth = truth_of(model.train(), [[FEW]])
        model.set_experts_implementation(case.experts)
        engine = build_engine(case.engine, dist.get_world_size())
        options: Any = {"ring_degree": dist.get_world_size(), "grad_reduction": engine.grad_reduction}
        handle = longspan.prepare(model, dist.get_world_size(), memory=WAYS[case.way], **options)
        module = engine.wrap(model, handle)
        with engine.accumulating(last=True):
            part = handle.shard(FEW.batch())
            out = module(**part)
            out.loss.backward()
        assert part["input_ids"].numel() < EXPERTS, "each may get a token, which shows nothing"
        assert all(p.grad is not None for p in model.parameters())
        engine.reduce()
    errors = {name: relative(g, truth.gradients[name]) for name, g in gradients(model).items()}
    return errors | {"loss": apart(float(out.loss.detach()), truth.loss)}


@pytest.mark.parametrize("preset", MANY)
@pytest.mark.parametrize(
    ("experts", "engine", "way"),
    [("eager", "fsdp2", "graph"), ("grouped_mm", "single", "tiles"), ("batched_mm", "ddp", "graph")],
)
def test_experts_without_tokens_have_gradients(
    run_ranks: RunRanks, preset: str, experts: str, engine: str, way: str
) -> None:
    for errors in run_ranks(4, starved_errors, Starved(preset, experts, engine, way)):
        assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}


def untouched_case() -> None:
    """The bias by which DeepSeek-V3 chooses experts is no parameter: no step and no removal moves it."""
    with float64_throughout():
        model = random_model(preset_config("tiny-deepseek-v3"), torch.float64, torch.device("cpu"))
        gate: Any = model.model.layers[1].mlp.gate
        bias = gate.e_score_correction_bias
        before = bias.clone()
        handle = longspan.prepare(model, 2, memory=WAYS["tiles"])
        model(**handle.shard(FEW.batch())).loss.backward()
        handle.reduce_gradients()
        assert gate.weight.grad.abs().max() > 0
        with pytest.raises(ModelError, match="output_router_logits=True: longspan does not know how DeepseekV3"):
            model(**handle.shard(FEW.batch()), output_router_logits=True)
        handle.remove()
    assert gate.e_score_correction_bias is bias and torch.equal(bias, before) and before.abs().max() > 0


def test_the_bias_of_a_router_stays_as_it_is(run_ranks: RunRanks) -> None:
    run_ranks(2, untouched_case)


def moved_bias_case() -> float:
    """Return how far the loss is off when the bias has moved on one rank only, which shows that it takes part."""
    with float64_throughout():
        model = random_model(preset_config("tiny-deepseek-v3"), torch.float64, torch.device("cpu"))
        truth = truth_of(model, [[FEW]])
        model.model.layers[1].mlp.gate.e_score_correction_bias.neg_()
        handle = longspan.prepare(model, 2)
        return apart(float(model(**handle.shard(FEW.batch())).loss.detach()), truth.loss)


def test_the_bias_of_a_router_takes_part(run_ranks: RunRanks) -> None:
    assert min(run_ranks(2, moved_bias_case)) > 1e-4

"""Models that scale or cap the output of their head: loss, log-probabilities and logits against the plain model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import longspan
from dense import TOLERANCE, relative
from longspan.check.float64 import float64_throughout
from longspan.integrations.transformers.forward import OUTPUT
from longspan.keep import Keep, Memory
from longspan.loss import LossOptions
from models import Rows, _sizes, gradients, one_device
from pool import RunRanks

pytestmark = pytest.mark.dist

ROWS = Rows([[13, 4], [29], [1, 1, 8]])
FULL = ["full_attention"] * 2
CONFIGS: dict[str, Any] = {
    "softcap": lambda: hf.Gemma2Config(
        **_sizes(), layer_types=FULL, attn_logit_softcapping=None, final_logit_softcapping=2.0
    ),
    "multiplied": lambda: hf.CohereConfig(**_sizes(), logit_scale=0.25),
    "divided": lambda: hf.GraniteConfig(**_sizes(), logits_scaling=3.0),
    "scaled hidden states": lambda: hf.GraniteConfig(**_sizes(), residual_multiplier=0.3, embedding_multiplier=5.0),
}
FOUND = {
    "softcap": LossOptions(softcap=2.0),
    "multiplied": LossOptions(logit_scale=0.25),
    "divided": LossOptions(logit_scale=1 / 3.0),
    "scaled hidden states": LossOptions(),
}
WAYS = {"whole": Memory(), "tiles": Memory(5, Keep.X_O)}


def build(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager").to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)  # logits that a cap of 2 bends
    return model.train()


def errors_of(kind: str, degrees: tuple[int, int], way: str, logits: bool, forgets: bool = False) -> dict[str, float]:
    """Train one step, ask for log-probabilities and logits, and return the errors."""
    ulysses, ring = degrees
    with float64_throughout():
        model = build(kind)
        loss, wanted, _targets = one_device(model, [ROWS])
        options: Any = {"ulysses_degree": ulysses, "ring_degree": ring, "memory": WAYS[way], "logits": logits}
        handle = longspan.prepare(model, ulysses * ring, **options)
        found = handle.logit_options
        with patch.object(handle, "logit_options", LossOptions()) if forgets else nullcontext():
            part = handle.shard(ROWS.batch())
            out = model(**part)
            out.loss.backward()
            handle.reduce_gradients()
        errors = {name: relative(g, wanted[name]) for name, g in gradients(model).items()}
        errors["loss"] = relative(out.loss.detach(), torch.tensor(loss))
        with torch.no_grad():
            logps, entropy = handle.token_logps(part, entropy=True, gather=True)
            scores = handle.gather(model(**part, **{OUTPUT: "scores"}).logits, part)
            full = handle.gather(out.logits, part) if logits else None
            with handle.bypass():
                truth = [_alone(model, ids, labels) for ids, labels in ROWS.alone()]
        for name, at, values in (("logps", 0, logps), ("entropy", 1, entropy), ("scores", 0, scores[..., 0])):
            errors[name] = relative(_nonzero(values), torch.cat([t[at] for t in truth]))
        if full is not None:
            errors["logits"] = max(_apart(full, truth))
    assert found == FOUND[kind]
    return errors


def _alone(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    wanted = labels[1:] != -100
    log_probs = F.log_softmax(logits[:-1][wanted], -1)
    picked = log_probs.gather(-1, labels[1:][wanted][:, None])[:, 0]
    return picked, -(log_probs.exp() * log_probs).sum(-1), logits


def _nonzero(values: torch.Tensor) -> torch.Tensor:
    return values[values != 0]


def _apart(full: torch.Tensor, truth: list[tuple[torch.Tensor, ...]]) -> list[float]:
    found, documents = [], iter(truth)
    for row, lengths in enumerate(ROWS.documents):
        start = 0
        for length in lengths:
            found.append(relative(full[row, start : start + length], next(documents)[2]))
            start += length
    return found


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2)], ids=["one", "u2", "r2"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_logps_and_logits_equal_one_device(run_ranks: RunRanks, kind: str, degrees: tuple[int, int]) -> None:
    for way, logits in (("whole", False), ("whole", True), ("tiles", False)):
        for errors in run_ranks(degrees[0] * degrees[1], errors_of, kind, degrees, way, logits):
            assert max(errors.values()) <= TOLERANCE, {k: v for k, v in errors.items() if not v <= TOLERANCE}


@pytest.mark.parametrize("kind", ["softcap", "multiplied", "divided"])
def test_a_forgotten_change_is_seen(run_ranks: RunRanks, kind: str) -> None:
    for errors in run_ranks(2, errors_of, kind, (2, 1), "whole", False, True):
        assert errors["loss"] > 1e-3


def kinds_in(dtype: torch.dtype) -> dict[str, LossOptions]:
    return {kind: longspan.prepare(build(kind, dtype), 1).logit_options for kind in CONFIGS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_are_recognised_in_the_models_own_type(run_ranks: RunRanks, dtype: torch.dtype) -> None:
    (found,) = run_ranks(1, kinds_in, dtype)
    assert found == FOUND

"""Streamed layers in low precision lose no more than the plain model does."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan.engines import build_engine
from longspan.keep import Keep, Memory
from pool import RunRanks

pytestmark = pytest.mark.dist

WAYS: dict[str, Any] = {
    "plain": "auto",
    "x+O": Memory(16, Keep.X_O),
    "x, none": Memory(24, (Keep.X, Keep.NONE)),
    "compiled": Memory(16, Keep.X_O_KV, "eager"),
}


def build(dtype: torch.dtype, layers: int = 2) -> Any:
    """Build a model whose weights bf16 holds exactly."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": layers}
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.1,
    }
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads), attn_implementation="sdpa")
    return model.to(torch.bfloat16).to(dtype).train()


def batch(tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(61, (1, tokens), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name] = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).double()
    return found


def truth(tokens: int, layers: int = 2) -> dict[str, Tensor]:
    model = build(torch.float64, layers)
    model(**batch(tokens)).loss.backward()
    return gradients(model)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor], part: str = "") -> float:
    """Return the relative error of all gradients together, each weighing the same."""
    errors = [float((found[n] - g).norm() / g.norm()) for n, g in wanted.items() if part in n]
    return float(torch.tensor(errors).square().mean().sqrt())


def low_precision_errors(mode: str) -> dict[str, float]:
    """Return the error of the gradients of each way to run the layers."""
    wanted = truth(96)
    errors = {}
    for way, memory in WAYS.items():
        engine = build_engine("fsdp2" if mode == "fsdp2" else "single", dist.get_world_size(), _compute(mode))
        model = build(torch.bfloat16 if mode == "bf16" else torch.float32)
        handle = longspan.prepare(model, dist.get_world_size(), memory=memory)
        module = engine.wrap(model, handle)
        with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext():
            loss = module(**handle.shard(batch(96))).loss
        loss.backward()
        engine.reduce()
        errors[way] = error(gradients(model), wanted)
    return errors


def _compute(mode: str) -> torch.dtype | None:
    return torch.bfloat16 if mode == "fsdp2" else None


@pytest.mark.parametrize("mode", ["autocast", "bf16", "fsdp2"])
def test_errors_are_no_worse_than_those_of_the_plain_model(run_ranks: RunRanks, mode: str) -> None:
    errors = run_ranks(2 if mode == "fsdp2" else 1, low_precision_errors, mode)[0]
    assert 1e-3 < errors["plain"] < 0.1
    assert all(found < 1.1 * errors["plain"] for found in errors.values()), errors


def errors_by_tiles(tokens: int, tiles: tuple[int, ...]) -> list[float]:
    """Return the error of the layer's weight gradients in bf16, for each number of tiles."""
    wanted, plain = truth(tokens, layers=1), build(torch.bfloat16, layers=1)
    errors = []
    for count in tiles:
        model = copy.deepcopy(plain)
        handle = longspan.prepare(model, 1, memory=Memory(tokens // count, Keep.X_O_KV))
        model(**handle.shard(batch(tokens))).loss.backward()
        errors.append(error(gradients(model), wanted, "proj"))
    return errors


def test_weight_gradients_in_bf16_do_not_suffer_from_many_tiles(run_ranks: RunRanks) -> None:
    (errors,) = run_ranks(1, errors_by_tiles, 1024, (1, 16, 128, 1024))
    assert 1e-3 < errors[0] < 0.1
    assert all(found < 1.1 * errors[0] for found in errors), errors

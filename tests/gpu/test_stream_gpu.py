"""Streamed layers on a GPU: no wait for the device inside a layer, and no more rounding than the plain model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import longspan
from longspan.check.float64 import float64_throughout
from longspan.keep import Keep, Memory
from longspan.stream.function import StreamedLayer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "dense": lambda: LlamaConfig(**SIZES),
    "experts": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
}
MEMORIES: dict[str, Any] = {
    "x+O+KV": Memory(256, Keep.X_O_KV),
    "x, none": Memory(192, (Keep.X, Keep.NONE)),
    "compiled": Memory(256, Keep.X_O, "inductor"),
}


def build(kind: str, dtype: torch.dtype) -> Any:
    """Build a model whose weights bf16 holds exactly."""
    torch.manual_seed(1)
    experts = "grouped_mm" if dtype == torch.bfloat16 else "eager"
    options = {"experts_implementation": experts} if kind == "experts" else {}
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="sdpa", **options)
    return model.to(torch.bfloat16).to("cuda", dtype).train()


def batch(packed: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(512, (1, 1024), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(1024)[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions % 300 if packed else positions}


def gradients(model: Any, fields: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**fields).loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    errors = [float((found[name] - g).norm() / g.norm()) for name, g in wanted.items()]
    return float(torch.tensor(errors).square().mean().sqrt())


@contextmanager
def no_waits(inside: list[str]) -> Iterator[None]:
    """Make every wait for the GPU inside a streamed layer an error."""

    def strictly(name: str, real: Callable[..., Any]) -> Any:
        def run(*args: Any) -> Any:
            inside.append(name)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return real(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return staticmethod(run)

    with (
        patch.object(StreamedLayer, "forward", strictly("forward", StreamedLayer.forward)),
        patch.object(StreamedLayer, "backward", strictly("backward", StreamedLayer.backward)),
    ):
        yield


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_do_not_wait_for_the_gpu(kind: str, memory: str, packed: bool) -> None:
    model = build(kind, torch.bfloat16)
    handle = longspan.prepare(model, memory=MEMORIES[memory])
    part = handle.shard(batch(packed))
    gradients(model, part)  # compiles, and makes what is made once per micro-batch
    inside: list[str] = []
    with no_waits(inside):
        gradients(model, part)
    assert inside.count("forward") == inside.count("backward") == 2


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_errors_are_no_worse_than_those_of_the_plain_model(kind: str, memory: str) -> None:
    wanted = gradients(build(kind, torch.float64), {k: v.cuda() for k, v in batch().items()})
    plain = error(gradients(build(kind, torch.bfloat16), {k: v.cuda() for k, v in batch().items()}), wanted)
    model = build(kind, torch.bfloat16)
    handle = longspan.prepare(model, memory=MEMORIES[memory])
    # experts of tokens that stand between two are chosen by rounding, in the plain model too
    assert error(gradients(model, handle.shard(batch())), wanted) <= (1.5 if kind == "experts" else 1.15) * plain


def test_the_auxiliary_loss_is_that_of_transformers() -> None:
    model = build("experts", torch.float32)
    fields = {k: v.cuda() for k, v in batch().items()}
    with torch.no_grad():
        wanted = model(**fields).aux_loss
        handle = longspan.prepare(model, kernel="reference", memory=Memory(192, Keep.X_O))
        found = model(**handle.shard(batch())).aux_loss
    assert float((found - wanted).abs() / wanted) < 1e-4


def test_dropout_is_drawn_again() -> None:
    """A directional derivative by finite differences, with dropout drawn on the GPU."""
    with float64_throughout():
        model = build("dense", torch.float64)
        for layer in model.model.layers:
            layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(0.3))
        handle = longspan.prepare(model, kernel="reference", memory=Memory(192, Keep.X))
        part = handle.shard(batch())
        weight = model.model.layers[0].mlp.gate_proj.weight

        def loss() -> Tensor:
            torch.manual_seed(4)
            return model(**part).loss

        loss().backward()
        direction, step, losses = weight.grad / weight.grad.norm(), 1e-5, []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(direction, alpha=sign * step)
                losses.append(float(loss()))
                weight.sub_(direction, alpha=sign * step)
    numeric = (losses[0] - losses[1]) / (2 * step)
    assert float(weight.grad.norm()) == pytest.approx(numeric, rel=1e-4)

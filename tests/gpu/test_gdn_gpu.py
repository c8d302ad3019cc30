"""A layer of Qwen3-Next's shape on two GPUs: no more rounding than on one, by head exchange and by passing states."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import WORLD, check_on_gpus, join, own_gpu
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

import longspan
from longspan.check.float64 import float64_throughout
from longspan.keep import Keep, Memory
from longspan.recurrent.rule import ChunkedRule
from longspan.recurrent.select import pick_rule

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

TOKENS = 1024
MEMORIES = {"plain": Memory(), "streamed": Memory(192, Keep.X_O)}


def build(dtype: torch.dtype) -> Any:
    """Build one recurrent and one softmax layer with a dense MLP, whose weights bf16 holds exactly; decay is slow."""
    torch.manual_seed(1)
    config = Qwen3NextConfig(
        hidden_size=1024,
        intermediate_size=1024,
        vocab_size=512,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=0,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    model: Any = Qwen3NextForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log.copy_(torch.linspace(-6.0, -2.0, 32))
    return model.to(torch.bfloat16).to("cuda", dtype).train()


def batch() -> dict[str, Tensor]:
    """A document that goes on over the middle of the row, between others."""
    ids = torch.randint(512, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(n) for n in (350, 450, 1, TOKENS - 801)])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def step(model: Any, size: int, memory: Memory, kernel: str = "auto") -> dict[str, Tensor]:
    handle = longspan.prepare(model, size, memory=memory, kernel=kernel)
    model.zero_grad()
    model(**handle.shard(batch())).loss.backward()
    handle.reduce_gradients()
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    handle.remove()
    return found


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    errors = [float((found[name] - g).norm() / g.norm()) for name, g in wanted.items()]
    return float(torch.tensor(errors).square().mean().sqrt())


def reference() -> dict[str, Tensor]:
    """Compute in fp64 with the slow kernels; the layer's own, if it has fast ones, cannot be compared with there."""
    model = build(torch.float64)
    with (
        float64_throughout(),
        patch("longspan.integrations.transformers.applied.pick_rule", lambda *_: (ChunkedRule(), "")),
        patch("longspan.integrations.transformers.probe.check_mixer"),
    ):
        return step(model, 1, Memory(), kernel="reference")


def check(rank: int, port: int) -> None:
    device = own_gpu(rank)
    start_s = time.perf_counter()
    truth = reference()
    if rank == 0:
        print(f"truth in {time.perf_counter() - start_s:.1f} s")
    model = build(torch.bfloat16)
    alone = error(step(model, 1, Memory()), truth)
    assert 1e-3 < alone < 0.1
    join(rank, port)
    try:
        for groups in (2, 1):  # heads exchanged; states passed on
            with patch("longspan.comm.regroup.groups_of", lambda heads, size, groups=groups: min(size, groups)):
                for name, memory in MEMORIES.items():
                    found = error(step(model, WORLD, memory), truth)
                    if rank == 0:
                        rule = pick_rule("auto", device)[1]
                        print(f"{rule}: {groups} groups, {name}: {found:.4f}, on one GPU {alone:.4f}")
                    assert found < 1.3 * alone
    finally:
        dist.destroy_process_group()


def test_two_gpus_round_as_one() -> None:
    check_on_gpus(check)

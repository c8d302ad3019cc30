"""DeepSpeed on two GPUs in bf16: losses and gradient norms of one GPU with float32 parameters, to bf16's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import WORLD, check_on_gpus, join, own_gpu
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan.engines import Zero
from longspan.keep import Keep, Memory
from longspan.optim import build_optimizer, choose_stepping

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

STEPS, MAX_NORM, TOLERANCE = 5, 0.5, 0.03
CASES: dict[str, tuple[int, Any]] = {
    "plain": (1, Memory()),
    "x+O": (1, Memory(128, Keep.X_O)),
    "x, none": (2, Memory(96, (Keep.X, Keep.NONE))),
    "compiled": (1, Memory(128, Keep.X_O_KV, "inductor")),
    "auto": (1, "auto"),
}
"""Ring degree, and what layers keep."""


def build() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        vocab_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).cuda().train()


def micro_batches(step: int) -> list[dict[str, Tensor]]:
    """Make two, of which the second has no target in every other step."""
    made = []
    for index, length in enumerate((700, 513)):
        ids = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(10 * step + index))
        labels = ids.clone() if index == 0 or step % 2 else torch.full_like(ids, -100)
        made.append({"input_ids": ids, "labels": labels})
    return made


def targets(step: int) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches(step))


def one_gpu() -> list[tuple[float, float]]:
    model = build()
    optimizer = build_optimizer("adamw", model, lr=1e-3)
    history = []
    for step in range(STEPS):
        total = 0.0
        for batch in micro_batches(step):
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(input_ids=batch["input_ids"].cuda(), use_cache=False).logits[0, :-1].float()
            labels = batch["labels"][0, 1:].cuda()
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / targets(step)
            loss.backward()
            total += loss.item()
        history.append((total, float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))))
        optimizer.step()
        optimizer.zero_grad()
    return history


def _rank(rank: int, port: int, stage: int, case: str, expected: list[tuple[float, float]]) -> None:
    own_gpu(rank)
    join(rank, port, "cpu:gloo,cuda:nccl")
    ring, memory = CASES[case]
    engine = Zero(stage, torch.bfloat16 if stage else None)
    model = build() if stage else build().bfloat16()
    handle = longspan.prepare(model, WORLD, ring_degree=ring, memory=memory)
    module = engine.wrap(model, handle)
    stepping = choose_stepping(build_optimizer("adamw", module, lr=1e-3), engine, False, MAX_NORM)
    for step, (loss, norm) in enumerate(expected):
        stepping.begin(1e-3)
        total = 0.0
        for index, batch in enumerate(micro_batches(step)):
            with engine.accumulating(last=index == 1):
                out = module(**handle.shard(batch, num_items=targets(step)))
                engine.backward(out.loss)
            total += out.loss.item()
        assert total == pytest.approx(loss, rel=TOLERANCE), step
        assert float(stepping.norm()) == pytest.approx(norm, rel=TOLERANCE), step
        stepping.finish()
    if stage:
        assert engine.whole(model.lm_head.weight).shape == (512, 256)
        assert engine.whole(model.lm_head.weight).dtype == torch.float32
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_steps_equal_one_gpu(stage: int, case: str) -> None:
    expected = one_gpu()
    assert max(norm for _, norm in expected) > MAX_NORM, "clipping is at work"
    check_on_gpus(_rank, stage, case, expected)

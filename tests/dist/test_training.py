"""Five optimizer steps: losses, gradient norms and parameters equal those of one process, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan.engines import build_engine

pytestmark = pytest.mark.dist

STEPS = 5
MAX_NORM = 0.5


@dataclass(frozen=True)
class Layout:
    """Processes, the share of them that divides a sequence, and the ring's part of it."""

    world: int
    size: int
    ring: int


LAYOUTS = {
    "sp2 ulysses": Layout(2, 2, 1),
    "sp2 ring": Layout(2, 2, 2),
    "dp2 x sp2": Layout(4, 2, 1),
    "hybrid 2x2": Layout(4, 4, 2),
}


@dataclass(frozen=True)
class History:
    """What a run reports of each step, and the parameters it ends with."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def build(adapters: bool = False) -> Any:
    torch.manual_seed(11)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, initializer_range=0.2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if not adapters:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(12)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def micro_batches(step: int, count: int) -> list[dict[str, Tensor]]:
    """Make a step's micro-batches: unlike lengths, unlike numbers of targets, and one of several without any."""
    made = []
    for index in range(count):
        length = 21 + 7 * ((step + index) % 4)
        ids = torch.randint(61, (1, length), generator=torch.Generator().manual_seed(100 * step + index))
        labels = ids.clone()
        labels[:, : length if count > 1 and index == 1 else 3 * index] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def targets(batches: list[dict[str, Tensor]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    # of the second order in the gradient's size, so that a wrong factor shows
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def trained(model: Any) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}


def one_process(count: int, adapters: bool = False) -> History:
    """Train the unprepared model on all micro-batches of each step."""
    model = build(adapters)
    optimizer = optimizer_of(trained(model).values())
    losses, norms = [], []
    for step in range(STEPS):
        batches = micro_batches(step, count)
        total = 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="sum") / targets(batches)
            loss.backward()
            total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return History(losses, norms, {n: p.detach().clone() for n, p in trained(model).items()})


def divided(engine_name: str, layout: Layout, accumulation: int, adapters: bool = False) -> History:
    """Train the prepared model; data ranks take the micro-batches of a step in turn."""
    engine = build_engine(engine_name, dist.get_world_size(), None)
    model = build(adapters)
    handle = longspan.prepare(model, layout.size, ring_degree=layout.ring, grad_reduction=engine.grad_reduction)
    module = engine.wrap(model, handle)
    optimizer = optimizer_of(trained(module).values())
    replicas, replica = handle.mesh.data.size, handle.mesh.data.rank
    losses, norms = [], []
    for step in range(STEPS):
        batches = micro_batches(step, accumulation * replicas)
        mine = batches[replica::replicas]
        total = 0.0
        for index, batch in enumerate(mine):
            with engine.accumulating(last=index + 1 == len(mine)):
                loss = module(**handle.shard(batch, num_items=targets(batches))).loss
                loss.backward()
            total += loss.item()
        engine.reduce()
        norms.append(float(engine.clip_grad_norm(MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return History(losses, norms, {n: engine.whole(p).clone() for n, p in trained(module).items()})


@pytest.mark.matrix
@pytest.mark.parametrize(("accumulation", "adapters"), [(1, False), (3, False), (2, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_five_steps_equal_one_process(
    run_ranks: Any, engine: str, layout: str, accumulation: int, adapters: bool
) -> None:
    if adapters:
        pytest.importorskip("peft")
    where = LAYOUTS[layout]
    expected = one_process(accumulation * where.world // where.size, adapters)
    start = {n: p.detach() for n, p in trained(build(adapters)).items()}
    assert max(expected.norms) > MAX_NORM, "clipping is at work"
    assert all(float((p - start[n]).norm() / p.norm()) > 1e-3 for n, p in expected.parameters.items()), "all move"
    for found in run_ranks(where.world, divided, engine, where, accumulation, adapters):
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=1e-3)
        assert found.parameters.keys() == expected.parameters.keys()
        for name, value in expected.parameters.items():
            assert float((found.parameters[name] - value).norm() / value.norm()) <= 1e-6, name

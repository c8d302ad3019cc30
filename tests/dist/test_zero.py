"""DeepSpeed's stages: five steps equal those of one process, in fp32, and the same model goes on after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_training import LAYOUTS, MAX_NORM, STEPS, History, Layout, build, micro_batches, optimizer_of, targets
from torch import Tensor, nn

import longspan
from longspan.engines import MPU, Zero
from longspan.optim import choose_stepping
from longspan.plan.keep import Keep, Memory

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist

TOLERANCE = 2e-6
MEMORIES = {
    "plain": Memory(),
    "x+O": Memory(6, Keep.X_O),
    "x, none": Memory(5, (Keep.X, Keep.NONE)),
    "auto": "auto",
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    stage: int
    layout: Layout
    memory: str = "x+O"
    adapters: bool = False
    tied: bool = False
    accumulation: int = 2


@contextmanager
def launched() -> Iterator[None]:
    """Have what launchers set, on CPUs."""
    before = dict(os.environ)
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), DS_ACCELERATOR="cpu")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def model_of(adapters: bool = False, tied: bool = False) -> Any:
    model = build()
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    if not adapters:
        return model
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    return model.train()


def one_process(count: int, adapters: bool = False, tied: bool = False) -> History:
    """Train the unprepared model on all micro-batches of each step."""
    model = model_of(adapters, tied)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(trained)
    losses, norms = [], []
    for step in range(STEPS):
        batches, total = micro_batches(step, count), 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="sum") / targets(batches)
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(trained, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return History(losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()})


class Run:
    """A model under an engine."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.case, self.engine = case, Zero(case.stage, **options)
        self.model = model_of(case.adapters, case.tied)
        memory: Any = MEMORIES[case.memory]
        self.handle = longspan.prepare(
            self.model,
            case.layout.size,
            ring_degree=case.layout.ring,
            grad_reduction=self.engine.grad_reduction,
            memory=memory,
        )
        self.module = self.engine.wrap(self.model, self.handle)
        optimizer = optimizer_of([p for p in self.module.parameters() if p.requires_grad])
        self.stepping = choose_stepping(optimizer, self.engine, False, MAX_NORM)

    def step(self, number: int) -> tuple[float, float]:
        """Take an optimizer step; data ranks take its micro-batches in turn."""
        replicas, replica = self.handle.mesh.data.size, self.handle.mesh.data.rank
        batches = micro_batches(number, self.case.accumulation * replicas)
        mine, total = batches[replica::replicas], 0.0
        self.stepping.begin(0.2)
        for index, batch in enumerate(mine):
            with self.engine.accumulating(last=index + 1 == len(mine)):
                loss = self.module(**self.handle.shard(batch, num_items=targets(batches))).loss
                self.engine.backward(loss)
            total += loss.item()
        self.engine.reduce()
        norm = float(self.stepping.norm())
        self.stepping.finish()
        return total, norm

    def parameters(self) -> dict[str, Tensor]:
        return {name: self.engine.whole(p).clone() for name, p in self.model.named_parameters()}


def divided(case: Case, **options: Any) -> History:
    with launched():
        run = Run(case, **options)
        steps = [run.step(number) for number in range(STEPS)]
        history = History([loss for loss, _ in steps], [norm for _, norm in steps], run.parameters())
        run.engine.close()
    return history


def check(found: History, expected: History, tolerance: float = TOLERANCE) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        error = float((found.parameters[name] - value).norm() / value.norm())
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("memory", ["plain", "x+O"])
@pytest.mark.parametrize("layout", ["sp2 ulysses", "sp2 ring", "dp2 x sp2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_steps_equal_one_process(run_ranks: Any, stage: int, layout: str, memory: str, adapters: bool) -> None:
    case = Case(stage, LAYOUTS[layout], memory, adapters)
    expected = one_process(case.accumulation * case.layout.world // case.layout.size, adapters)
    start = {n: p.detach() for n, p in model_of(adapters).named_parameters() if p.requires_grad}
    assert max(expected.norms) > MAX_NORM, "clipping is at work"
    assert all(float((expected.parameters[n] - p).norm() / p.norm()) > 1e-3 for n, p in start.items()), "all move"
    for found in run_ranks(case.layout.world, divided, case):
        check(found, expected)

"""One optimizer step with streamed layers against one device, in fp64: dense, expert and adapter models."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import longspan
from dense import TOLERANCE, apart, relative
from longspan.check.float64 import float64_throughout
from longspan.engines import build_engine
from longspan.keep import Memory
from models import Rows, build

Errors = dict[str, float]

COEFFICIENT = 0.5
PLAIN = Rows([[15], [11]])
PACKED = Rows([[5, 1, 9], [4, 6]], seed=1)
BATCHES = {"plain": (PLAIN,), "packed": (PACKED,), "plain, packed": (PLAIN, PACKED), "packed, plain": (PACKED, PLAIN)}


@dataclass(frozen=True)
class Case:
    """One optimizer step; a batch has the rows of one data rank, or of two."""

    preset: str
    degrees: tuple[int, int]
    memory: Memory
    engine: str = "single"
    batch: str = "plain"

    @property
    def size(self) -> int:
        return self.degrees[0] * self.degrees[1]


def make(preset: str) -> Any:
    """Build a model in fp64: `moe` adds half its auxiliary loss, `lora` has a frozen base and adapters that act."""
    model = build({"dense": "llama", "lora": "llama", "moe": "qwen3-moe"}.get(preset, preset))
    if preset == "lora":
        return adapted(model)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
        model.router_aux_loss_coef = COEFFICIENT
    return model


def adapted(model: Any, **config: Any) -> Any:
    """Freeze a model and add adapters with random weights."""
    from peft import LoraConfig, get_peft_model

    config = {"r": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]} | config
    found = get_peft_model(model, LoraConfig(**config)).double()
    with torch.no_grad():
        for p in found.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    return found.train()


@dataclass(frozen=True)
class Truth:
    loss: float
    auxiliary: float
    gradients: dict[str, Tensor]


def truth_of(model: Any, micro_batches: Sequence[Sequence[Rows]]) -> Truth:
    """Run the plain model on each document alone; the auxiliary loss of a micro-batch is that of all its tokens.

    Args:
        micro_batches: what the data ranks compute together, in turn.
    """
    plain = copy.deepcopy(model)
    plain.zero_grad()
    targets = sum(rows.targets() for batch in micro_batches for rows in batch)
    config, total, auxiliary = plain.config, torch.zeros(()), 0.0
    balances = getattr(config, "output_router_logits", False)
    for batch in micro_batches:
        logits: list[tuple[Tensor, ...]] = []
        for ids, labels in (document for rows in batch for document in rows.alone()):
            out = plain(input_ids=ids[None], use_cache=False)
            total = (
                total + F.cross_entropy(out.logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum") / targets
            )
            logits.append(out.router_logits if balances else ())
        if balances:
            joined = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
            loss: Any = load_balancing_loss_func(joined, plain.num_experts, plain.num_experts_per_tok)  # type: ignore[arg-type]
            total = total + COEFFICIENT * loss * (sum(rows.targets() for rows in batch) / targets)
            auxiliary = float(loss.detach())
    total.backward()
    return Truth(float(total.detach()), auxiliary, gradients(plain))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients of what is trained."""
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            found[name.removeprefix("module.")] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        else:
            assert p.grad is None, name
    return found


@functools.cache
def shared_truth(preset: str, batch: str) -> Truth:
    return truth_of(make(preset), [BATCHES[batch]])


def step_errors(case: Case) -> Errors:
    """Train one step, and return the relative errors of loss, auxiliary loss and gradients."""
    with float64_throughout():
        truth = shared_truth(case.preset, case.batch)
        model, engine = make(case.preset), build_engine(case.engine, dist.get_world_size())
        ulysses, ring = case.degrees
        handle = longspan.prepare(
            model,
            case.size,
            ulysses_degree=ulysses,
            ring_degree=ring,
            grad_reduction=engine.grad_reduction,
            memory=case.memory,
        )
        module = engine.wrap(model, handle)
        batch = BATCHES[case.batch]
        rows = batch[handle.mesh.data.rank]
        with engine.accumulating(last=True):
            out = module(**handle.shard(rows.batch(), num_items=sum(r.targets() for r in batch)))
            out.loss.backward()
        engine.reduce()
    errors = {name: relative(g, truth.gradients[name]) for name, g in gradients(model).items()}
    assert errors.keys() == truth.gradients.keys()
    assert all(float(g.abs().max()) > 1e-4 for g in truth.gradients.values()), "a gradient that is worth no test"
    if truth.auxiliary:
        errors["auxiliary"] = apart(float(out.aux_loss.detach()), truth.auxiliary)
    return errors | {"loss": apart(float(out.loss.detach()), truth.loss)}


def all_errors(cases: Sequence[Case]) -> list[tuple[Case, str, float]]:
    """Run cases one after the other, and return what is wrong."""
    wrong = []
    for case in cases:
        wrong += [(case, name, error) for name, error in step_errors(case).items() if not error <= TOLERANCE]
    return wrong

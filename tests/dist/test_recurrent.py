"""Models with gated delta nets against one device, in fp64: every exchange, packing and decision, and leaks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import longspan
import longspan.recurrent.build as build_of_recurrence
import models
import test_zero
from dense import TOLERANCE, apart, relative
from longspan.check.float64 import float64_throughout
from longspan.comm.regroup import Regroup
from longspan.engines import build_engine
from longspan.keep import Keep, Memory
from longspan.recurrent.build import Share
from longspan.recurrent.rule import ChunkedRule
from longspan.recurrent.stretch import Stretch
from models import Rows, build, one_device
from pool import RunRanks
from steps import adapted, gradients

pytestmark = pytest.mark.dist

Errors = dict[str, float]

FAMILIES = ("qwen3-next", "qwen3.5")
DEGREES = {"u2": (2, 1), "r2": (1, 2), "2x2": (2, 2), "u4": (4, 1), "u3": (3, 1), "r3": (1, 3)}
"""Of 2 and 3 key heads: 3 and 4 ranks are beyond the first, 4 beyond the second, and 2 divide the second unevenly."""

ONE = Rows(((150,),))
PACKED = Rows(((20, 1, 6, 14),), seed=1)
RAGGED = Rows(((13, 4), (29,), (1, 1, 8)), seed=2)
BATCHES = (ONE, PACKED, RAGGED)
STREAMED = [
    Memory(7, Keep.X_O),
    Memory(1000, Keep.X_O_KV),
    Memory(3, Keep.X),
    Memory(7, (Keep.X, Keep.NONE, Keep.NONE)),
    Memory(7, (Keep.X_O, Keep.OUT, Keep.GRAPH)),
]


@dataclass(frozen=True)
class Case:
    family: str
    degrees: tuple[int, int]
    memory: Memory = field(default_factory=Memory)
    steps: tuple[tuple[Rows, ...], ...] = ((PACKED,),)
    engine: str = "single"
    mistake: str | None = None
    adapters: bool = False

    @property
    def size(self) -> int:
        return self.degrees[0] * self.degrees[1]


def make(case: Case) -> Any:
    """Build a model; with adapters on what is projected for the recurrences and from them."""
    model = build(case.family)
    if not case.adapters:
        return model
    targets = ["in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]
    return adapted(
        model, target_modules=[name for name in targets if f".{name}." in str(list(dict(model.named_parameters())))]
    )


@functools.cache
def truth(case: Case) -> tuple[float, dict[str, Tensor], int]:
    """Compute on one device; cached for cases that differ in how they run only."""
    return one_device(make(case), [rows for steps in case.steps for rows in steps])


def step_errors(case: Case) -> Errors:
    """Train one step, of as many micro-batches as there are, and return the errors of the loss and of each gradient."""
    ulysses, ring = case.degrees
    told = 0.0
    with float64_throughout():
        loss, wanted, targets = truth(Case(case.family, (1, 1), steps=case.steps, adapters=case.adapters))
        model, engine = make(case), build_engine(case.engine, torch.distributed.get_world_size())
        with MISTAKES[case.mistake]() if case.mistake else nullcontext():
            handle = longspan.prepare(
                model,
                case.size,
                ulysses_degree=ulysses,
                ring_degree=ring,
                memory=case.memory,
                grad_reduction=engine.grad_reduction,
            )
            module = engine.wrap(model, handle)
            mine = case.steps[handle.mesh.data.rank]
            for number, rows in enumerate(mine):
                with engine.accumulating(last=number == len(mine) - 1):
                    out = module(**handle.shard(rows.batch(), num_items=targets))
                    out.loss.backward()
                told += float(out.loss.detach())
            engine.reduce()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    assert all(float(g.abs().max()) > 1e-4 for g in wanted.values()), "a gradient that is worth no test"
    return {name: relative(found[name], wanted[name]) for name in wanted} | {"loss": apart(told, loss)}


def all_errors(cases: Sequence[Case]) -> list[tuple[Case, str, float]]:
    """Run cases one after the other, and return what is wrong."""
    return [
        (case, name, error) for case in cases for name, error in step_errors(case).items() if not error <= TOLERANCE
    ]


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_one_device(run_ranks: RunRanks, family: str, degrees: str) -> None:
    """Every batch meets plain and streamed layers; the decisions go round."""
    turn = (2 * FAMILIES.index(family) + list(DEGREES).index(degrees)) % len(STREAMED)
    ways = [*STREAMED[turn:], *STREAMED[:turn]]
    cases = [Case(family, DEGREES[degrees], Memory(), ((rows,),)) for rows in BATCHES]
    cases += [Case(family, DEGREES[degrees], way, ((rows,),)) for way, rows in zip(ways, BATCHES, strict=False)]
    for wrong in run_ranks(cases[0].size, all_errors, cases):
        assert not wrong


@pytest.mark.parametrize("way", STREAMED, ids=lambda way: str(way.keep))
def test_every_decision_on_one_rank_of_each_data_rank(run_ranks: RunRanks, way: Memory) -> None:
    steps = ((PACKED, ONE), (RAGGED, PACKED))
    for wrong in run_ranks(2, all_errors, [Case(family, (1, 1), way, steps) for family in FAMILIES]):
        assert not wrong


@pytest.mark.parametrize("memory", [Memory(), Memory(7, Keep.X_O)], ids=["plain", "streamed"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_engines_and_accumulation(run_ranks: RunRanks, engine: str, memory: Memory) -> None:
    steps = ((PACKED, RAGGED),)
    for wrong in run_ranks(2, all_errors, [Case(family, (2, 1), memory, steps, engine) for family in FAMILIES]):
        assert not wrong


@pytest.mark.parametrize("memory", [Memory(), Memory(7, Keep.X)], ids=["plain", "streamed"])
def test_adapters_on_projections(run_ranks: RunRanks, memory: Memory) -> None:
    pytest.importorskip("peft")
    for wrong in run_ranks(2, all_errors, [Case(family, (2, 1), memory, adapters=True) for family in FAMILIES]):
        assert not wrong


def one_document() -> Any:
    """Let recurrences take each row for one document, as cu_seqlens of a whole row does."""
    right = Share.of
    return patch.object(Share, "of", lambda mask, *rest: right(replace(mask, documents=None), *rest))


def conv_across_documents() -> Any:
    right = build_of_recurrence.causal_conv
    return patch.object(
        build_of_recurrence, "causal_conv", lambda x, w, numbers, halo: right(x, w, torch.zeros_like(numbers), halo)
    )


def state_across_documents() -> Any:
    right = ChunkedRule.outputs

    def outputs(self: ChunkedRule, operands: Any, stretch: Stretch, state: Tensor | None) -> Tensor:
        return right(self, operands, replace(stretch, numbers=torch.zeros_like(stretch.numbers)), state)

    return patch.object(ChunkedRule, "outputs", outputs)


def no_halo() -> Any:
    right = Share.of
    return patch.object(
        Share,
        "of",
        lambda mask, rows, layout, axis, heads, halo, device: right(mask, rows, layout, axis, heads, 0, device),
    )


def halo_without_gradient() -> Any:
    """Cut the gradient of the tokens before a stretch."""
    right = Regroup.to_shard

    def to_shard(self: Regroup, y: Tensor, halo: bool = False) -> Tensor:
        more = y.shape[1] - len(self.piece(self.stretch))
        return right(self, torch.cat([torch.zeros_like(y[:, :more]), y[:, more:]], 1), halo)

    return patch.object(Regroup, "to_shard", to_shard)


def state_not_passed() -> Any:
    right = Regroup.states_before
    return patch.object(Regroup, "states_before", lambda self, state: [0 * s for s in right(self, state)])


def state_without_gradient() -> Any:
    right = Regroup.states_after
    return patch.object(Regroup, "states_after", lambda self, states, like: 0 * right(self, states, like))


MISTAKES: dict[str, Any] = {
    "one-document": one_document,
    "conv-across-documents": conv_across_documents,
    "state-across-documents": state_across_documents,
    "no-halo": no_halo,
    "halo-without-gradient": halo_without_gradient,
    "state-not-passed": state_not_passed,
    "state-without-gradient": state_without_gradient,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_goes_red_for(run_ranks: RunRanks, mistake: str) -> None:
    """On 3 ranks, which is beyond 2 key heads, of a row whose documents go on from rank to rank."""
    for wrong in run_ranks(3, all_errors, [Case("qwen3-next", (3, 1), mistake=mistake)]):
        assert max(error for _, _, error in wrong) > 1e-4


@pytest.mark.parametrize(("degrees", "keep"), [("u2", Keep.PRODUCTS), ("r2", Keep.X_O), ("u4", Keep.X_O_KV)])
def test_compiled_tiles(run_ranks: RunRanks, degrees: str, keep: Keep) -> None:
    """The last tile of each rank is smaller, and runs as it is."""
    case = Case("qwen3.5", DEGREES[degrees], Memory(9, keep, "eager"))
    for wrong in run_ranks(case.size, all_errors, [case], timeout_s=300):
        assert not wrong


def step_under_autocast(model: Any, memory: Memory | None) -> dict[str, Tensor]:
    """Return gradients under bf16 autocast; None for the plain model."""
    model = copy.deepcopy(model)
    with float64_throughout():
        fields = ONE.batch()  # random numbers depend on the default dtype
    handle = None if memory is None else longspan.prepare(model, memory=memory)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**(fields | {"use_cache": False} if handle is None else handle.shard(fields))).loss
    loss.backward()
    return gradients(model)


def test_autocast_rounds_as_it_does_in_the_plain_model() -> None:
    model = build("qwen3.5", torch.float32)
    with float64_throughout():
        true = one_device(copy.deepcopy(model).double(), [ONE])[1]

    def error(memory: Memory | None) -> float:
        found = step_under_autocast(model, memory)
        errors = [float((g - true[name]).norm() / true[name].norm()) for name, g in found.items()]
        return float(torch.tensor(errors).square().mean().sqrt())

    plain = error(None)
    assert 0.01 < plain < 0.5
    for memory in (Memory(), Memory(13, Keep.X_O), Memory(13, Keep.X)):
        assert error(memory) < 1.3 * plain


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prepared_model_evaluates_generates_and_is_given_back(family: str) -> None:
    model = build(family).eval()
    before = [set(vars(module)) for module in model.modules()]
    with float64_throughout():
        wanted, fields = one_device(model, [RAGGED])[0], RAGGED.batch()
        prompt = fields["input_ids"][:, :9]
    with torch.no_grad(), float64_throughout():
        answer = model.generate(prompt, max_new_tokens=4, do_sample=False)
        handle = longspan.prepare(model, memory=Memory(7, Keep.X))
        assert apart(float(model(**handle.shard(fields)).loss), wanted) < TOLERANCE
        with handle.bypass():
            assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), answer)
    other = copy.deepcopy(model)
    mixers = [(module, vars(module)["forward"]) for module in other.modules() if hasattr(module, "A_log")]
    assert mixers and all(forward.module is module for module, forward in mixers), "a copy runs its own weights"
    handle.remove()
    assert [set(vars(module)) for module in model.modules()] == before


def small(dtype: torch.dtype = torch.float32) -> Any:
    """Build a model for DeepSpeed's stages, which compute in fp32."""
    torch.manual_seed(11)
    config = models.FAMILIES["qwen3.5"]()
    config.vocab_size, config.initializer_range = 61, 0.1
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    models.slow_decay(model)
    return model.train().to(dtype)


def of_small_models(function: Callable[[Any], Any], given: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Call a function of the tests of DeepSpeed's stages for this model."""
    memories = {"x, none": Memory(5, (Keep.X, Keep.NONE, Keep.NONE))}  # of three layers
    with (
        patch.object(test_zero, "model_of", lambda *_: small(dtype)),
        patch.dict(test_zero.MEMORIES, memories),
        float64_throughout() if dtype == torch.float64 else nullcontext(),
    ):
        return function(given)


@functools.cache
def trained_in(dtype: torch.dtype) -> Any:
    return of_small_models(test_zero.one_process, 2, dtype)


@pytest.mark.parametrize(("stage", "memory"), [(2, "x+O"), (3, "plain"), (3, "x+O"), (3, "x, none")])
def test_stages_of_deepspeed(run_ranks: RunRanks, stage: int, memory: str) -> None:
    """Convolution, `A_log` and `dt_bias` are read as weights, and gathered all the same.

    Five steps in fp32 part from those in fp64 in the plain model too; what else was wrong would be of order one.
    """
    true, plain, start = trained_in(torch.float64), trained_in(torch.float32), dict(small().named_parameters())

    def errors(history: Any) -> dict[str, float]:
        moved = {name: (p - start[name]).detach() for name, p in true.parameters.items()}
        assert min(float(m.norm()) for m in moved.values()) > 1e-4
        return {n: float((history.parameters[n] - p).norm() / moved[n].norm()) for n, p in true.parameters.items()}

    worst = max(errors(plain).values())
    assert worst < 5e-3
    case = test_zero.Case(stage, test_zero.LAYOUTS["sp2 ulysses"], memory)
    for found in run_ranks(2, of_small_models, test_zero.divided, case, timeout_s=200):
        assert found.losses == pytest.approx(true.losses, rel=1e-4)
        assert max(errors(found).values()) < 2 * worst

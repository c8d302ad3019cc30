"""Steps inside backward give the parameters of steps after it, bit for bit, and keep one gradient at a time."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan.engines import build_engine
from longspan.errors import ConfigError, TrainingError
from longspan.keep import Keep, Memory
from longspan.optim import HostAdamW, StepAfterBackward, StepInBackward, Stepping, build_optimizer

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
MEMORIES: dict[str, Any] = {
    "plain": "auto",
    "streamed": Memory(7, Keep.X_O),
    "segments": Memory(7, (Keep.X, Keep.NONE, Keep.NONE)),
}
COMPILED = Memory(8, Keep.X_O_KV, "eager")


@pytest.fixture
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def build(tied: bool, dtype: torch.dtype) -> Any:
    torch.manual_seed(11)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=67, initializer_range=0.2, tie_word_embeddings=tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(67, (1, 23 + step), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def train(
    kind: str, inside: bool, memory: Any = "auto", tied: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Tensor], list[float]]:
    """Train four steps; return the parameters and the norms."""
    model, engine = build(tied, dtype), build_engine("single", 1)
    handle = longspan.prepare(model, 1, memory=memory)
    module = engine.wrap(model, handle)
    optimizer = build_optimizer(kind, module, lr=1.0, weight_decay=0.1)
    stepping: Stepping = StepInBackward(optimizer) if inside else StepAfterBackward(optimizer, engine, None)
    assert stepping.applied_early is inside
    norms = []
    for step in range(1, 5):
        stepping.begin(1e-2 / step)
        module(**handle.shard(batch(step))).loss.backward()
        assert inside == all(p.grad is None for p in model.parameters())
        norms.append(float(stepping.norm()))
        stepping.finish()
        assert all(p.grad is None for p in model.parameters())
    return {n: p.detach().clone() for n, p in model.named_parameters()}, norms


def check_equal(expected: tuple[dict[str, Tensor], list[float]], found: tuple[dict[str, Tensor], list[float]]) -> None:
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "adamw-host"])
def test_inside_equals_after(kind: str, tied: bool, memory: str) -> None:
    expected = train("adamw", False, MEMORIES[memory], tied)
    start = dict(build(tied, torch.float32).named_parameters())
    assert all(not torch.equal(start[name], value) for name, value in expected[0].items())
    check_equal(expected, train(kind, True, MEMORIES[memory], tied))


@pytest.mark.slow
def test_inside_equals_after_in_compiled_layers() -> None:
    check_equal(train("adamw", False, COMPILED), train("adamw-host", True, COMPILED))


def test_host_states_after_backward() -> None:
    check_equal(train("adamw", False), train("adamw-host", False))


@pytest.mark.parametrize("kind", ["adamw", "adamw-host"])
def test_inside_equals_after_in_bfloat16(kind: str) -> None:
    check_equal(train(kind, False, dtype=torch.bfloat16), train(kind, True, dtype=torch.bfloat16))


@needs_torchao
@pytest.mark.usefixtures("eager")
def test_inside_equals_after_with_8_bit_states() -> None:
    check_equal(train("adamw8bit", False), train("adamw8bit", True))


@needs_torchao
@pytest.mark.usefixtures("eager")
def test_stochastic_rounding_works_inside() -> None:
    expected, norms = train("adamw-bf16-sr", False, dtype=torch.bfloat16)
    found, _ = train("adamw-bf16-sr", True, dtype=torch.bfloat16)
    assert all((p - found[n]).norm() < 0.05 * p.norm() for n, p in expected.items())
    assert len(norms) == 4


@pytest.mark.parametrize("kind", ["adamw", "adamw-host"])
def test_one_gradient_at_a_time(kind: str) -> None:
    model = build(True, torch.float32)
    optimizer = build_optimizer(kind, model, lr=1e-3)
    stepping = StepInBackward(optimizer)
    alive: list[int] = []
    gone: list[weakref.ref[Tensor]] = []

    def watch(parameter: Tensor) -> None:
        assert parameter.grad is not None
        alive.append(sum(p.grad is not None for p in model.parameters()))
        gone.append(weakref.ref(parameter.grad))

    stepping.remove()  # so that the watching hooks come first
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(watch)
    stepping = StepInBackward(optimizer)
    stepping.begin(1e-3)
    model(**batch(1)).loss.backward()
    stepping.finish()
    assert alive == [1] * len(list(model.parameters())), "each once, tied embeddings too"
    assert all(ref() is None for ref in gone)


def test_clipping_by_the_norm_of_the_step_before() -> None:
    weight = nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    stepping = StepInBackward(optimizer, max_norm=2.0)
    expected, norms, before = weight.detach().clone(), [], None
    for factor in (1.0, 3.0, 0.01, 1.0):  # gradients of norms 5, 15, 0.05, 5
        gradient = factor * torch.tensor([3.0, -4.0], dtype=torch.float64)
        scale = 1.0 if before is None else min(1.0, 2.0 / (before + 1e-6))
        expected -= 0.1 * scale * gradient
        before = 5.0 * factor
        stepping.begin(0.1)
        (weight * gradient).sum().backward()
        norms.append(float(stepping.norm()))
        stepping.finish()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)
    assert norms == pytest.approx([5.0, 15.0, 0.05, 5.0])


def test_gradients_that_stepping_inside_cannot_use() -> None:
    weight, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    stepping = StepInBackward(torch.optim.SGD([weight, unused], lr=0.5))
    with pytest.raises(TrainingError, match=r"outside a step, or twice in one\. .* one backward between begin"):
        weight.sum().backward()
    weight.grad = None
    stepping.begin(0.5)
    weight.sum().backward()
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))
    with pytest.raises(TrainingError, match="twice in one"):
        weight.sum().backward()
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))
    weight.grad = None
    stepping.finish()
    with pytest.raises(TrainingError, match="outside a step"):
        unused.sum().backward()
    stepping.remove()
    weight.sum().backward()
    assert weight.grad is not None and torch.equal(weight.detach(), torch.full((3,), 0.5))


def test_a_step_with_nothing_to_do() -> None:
    stepping = StepInBackward(HostAdamW([nn.Parameter(torch.ones(3))]), max_norm=1.0)
    for _ in range(2):
        stepping.begin(0.1)
        assert float(stepping.norm()) == 0.0
        stepping.finish()


def test_parameters_on_several_devices_are_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(ConfigError, match="one device, found cpu, meta"):
        StepInBackward(torch.optim.SGD(parameters, lr=0.1))


def test_a_weight_that_later_backward_still_reads_is_noticed() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    stepping = StepInBackward(HostAdamW([weight]))
    stepping.begin(0.1)
    x = torch.randn(2, 3, requires_grad=True)
    hidden = F.linear(x, weight.detach())  # reads the weight in backward, but gives it no gradient to wait for
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (F.linear(hidden, weight)).sum().backward()
    stepping.finish()

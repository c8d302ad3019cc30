"""Every engine leaves the gradients, the norm and the loss of one process with the plain model, in fp64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan.engines import build_engine
from longspan.errors import ConfigError, TopologyError
from longspan.keep import Keep, Memory
from longspan.train.checkpoint import full_state

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
MAX_NORM = 0.05


def build(tied: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        vocab_size=53,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float64).to(dtype)


def batches() -> list[dict[str, Tensor]]:
    """Four rows of unlike lengths and numbers of targets; one has no target at all."""
    made = []
    for index, length in enumerate((17, 30, 9, 25)):
        ids = torch.randint(53, (1, length), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[:, : (0, 11, 9, 5)[index]] = -100
        made.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)[None]})
    return made


def targets() -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches())


def truth(tied: bool) -> tuple[float, float, dict[str, Tensor]]:
    model = build(tied)
    total = 0.0
    for batch in batches():
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum") / targets()
        if batch["labels"][0, 1:].ne(-100).any():
            loss.backward()
            total += loss.item()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    return total, norm, {name: g * min(1.0, MAX_NORM / (norm + 1e-6)) for name, g in gradients.items()}


def train_one_step(
    engine_name: str,
    size: int,
    tied: bool = False,
    compute: torch.dtype | None = None,
    memory: Memory | Literal["auto"] = "auto",
) -> tuple[float, float, dict[str, Tensor]]:
    """Run one optimizer step's worth of gradients, twice, and return the second's loss, norm and clipped gradients."""
    engine = build_engine(engine_name, dist.get_world_size(), compute)
    model = build(tied, torch.float64 if compute is None else torch.float32)
    handle = longspan.prepare(model, size, grad_reduction=engine.grad_reduction, memory=memory)
    module = engine.wrap(model, handle)
    replicas, replica = handle.mesh.data.size, handle.mesh.data.rank
    mine = batches()[replica::replicas]
    loss, norm = 0.0, torch.zeros(())
    for _ in range(2):
        loss = 0.0
        model.zero_grad(set_to_none=True)
        for index, batch in enumerate(mine):
            with engine.accumulating(last=index == len(mine) - 1):
                out = module(**handle.shard(batch, num_items=targets()))
                out.loss.backward()
            loss += out.loss.item()
        engine.reduce()
        norm = engine.clip_grad_norm(MAX_NORM)
    if handle.compiler is not None:
        assert 0 < len(handle.compiler.graphs) <= 8 * len(mine), "layers of one kind share their graphs"
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradients[name.removeprefix("module.")] = whole.detach().clone()
    return loss, norm.item(), gradients


def check(
    found: tuple[float, float, dict[str, Tensor]], expected: tuple[float, float, dict[str, Tensor]], rel: float
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=rel)
    assert found[1] == pytest.approx(expected[1], rel=rel)
    assert found[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        error = (found[2][name].double() - value).norm() / value.norm()
        assert error <= rel, (name, float(error))
        assert found[2][name].abs().sum() > 0, name


MEMORIES = {
    "x+O+KV": Memory(5, Keep.X_O_KV),
    "x+O": Memory(4, Keep.X_O),
    "x, none": Memory(7, (Keep.X, Keep.NONE)),
    "compiled": Memory(4, Keep.X_O_KV, "eager"),
    "compiled, none": Memory(8, (Keep.X_O, Keep.NONE), "eager"),
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    ("engine", "world", "size"), [("ddp", 2, 2), ("ddp", 4, 4), ("fsdp2", 2, 1), ("fsdp2", 2, 2), ("fsdp2", 4, 2)]
)
def test_streamed_layers_under_engines(run_ranks: Any, memory: str, engine: str, world: int, size: int) -> None:
    expected = truth(False)
    for found in run_ranks(world, train_one_step, engine, size, memory=MEMORIES[memory]):
        check(found, expected, rel=TOLERANCE)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("engine", "world", "size"),
    [
        ("single", 2, 2),
        ("single", 2, 1),
        ("ddp", 2, 2),
        ("ddp", 4, 2),
        ("fsdp2", 2, 2),
        ("fsdp2", 2, 1),
        ("fsdp2", 4, 2),
    ],
)
def test_one_step_equals_one_process(run_ranks: Any, engine: str, world: int, size: int, tied: bool) -> None:
    expected = truth(tied)
    assert expected[1] > MAX_NORM  # so that clipping is part of the test
    for found in run_ranks(world, train_one_step, engine, size, tied):
        check(found, expected, TOLERANCE)


def gathered_state(tied: bool) -> dict[str, Tensor]:
    """Shard a model, gather it on rank 0, and then do what only works if every rank made the same collectives."""
    model = build(tied)
    handle = longspan.prepare(model, 2)
    build_engine("fsdp2", dist.get_world_size()).wrap(model, handle)
    state = full_state(model, keep=dist.get_rank() == 0)
    if tied and state:
        assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    alike = torch.full((), 3.0)
    dist.all_reduce(alike)
    assert alike.item() == 6.0
    return state


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_process_gathers_what_all_of_them_shard(run_ranks: Any, tied: bool) -> None:
    first, second = run_ranks(2, gathered_state, tied, timeout_s=30)
    assert second == {}
    expected = build(tied).state_dict()
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], value) for name, value in expected.items())


def gradient_after_each_micro_batch(engine_name: str) -> list[float | None]:
    engine = build_engine(engine_name, dist.get_world_size())
    model = build()
    handle = longspan.prepare(model, 1, grad_reduction=engine.grad_reduction)
    module = engine.wrap(model, handle)
    seen: list[float | None] = []
    for index in range(2):
        with engine.accumulating(last=index == 1):
            module(**handle.shard(batches()[2 * index + dist.get_rank()], num_items=targets())).loss.backward()
        gradient = module.get_parameter("module.lm_head.weight" if engine_name == "ddp" else "lm_head.weight").grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        seen.append(None if whole is None else whole.norm().item())
    return seen


def test_gradients_are_not_reduced_before_the_last_micro_batch(run_ranks: Any) -> None:
    first, second = run_ranks(2, gradient_after_each_micro_batch, "ddp")
    assert first[0] != pytest.approx(second[0])
    assert first[1] == pytest.approx(second[1])
    for seen in run_ranks(2, gradient_after_each_micro_batch, "fsdp2"):
        assert seen == [None, pytest.approx(first[1])]


def test_one_process_may_use_any_engine(run_ranks: Any) -> None:
    for engine in ("single", "ddp", "fsdp2"):
        check(run_ranks(1, train_one_step, engine, 1)[0], truth(False), TOLERANCE)


def test_compute_in_bf16_keeps_float32_parameters(run_ranks: Any) -> None:
    expected = truth(False)
    for found in run_ranks(2, train_one_step, "fsdp2", 2, False, torch.bfloat16):
        check(found, expected, 0.05)
        assert all(gradient.dtype == torch.float32 for gradient in found[2].values())


def test_engines_by_name() -> None:
    assert build_engine("auto", 1).name == "single"
    assert build_engine("auto", 2).name == "fsdp2"
    assert build_engine("auto", 1, torch.bfloat16).name == "fsdp2"
    with pytest.raises(ConfigError, match="Unknown engine 'zero'"):
        build_engine("zero", 1)
    with pytest.raises(ConfigError, match="use fsdp2"):
        build_engine("ddp", 2, torch.bfloat16)
    model = build()
    handle = longspan.prepare(model)
    for name in ("ddp", "fsdp2"):
        with pytest.raises(TopologyError, match="not initialised"):
            build_engine(name, 1).wrap(model, handle)

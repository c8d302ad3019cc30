"""Optimizers of sharded parameters give those of one process; what cannot is refused by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from longspan.errors import ConfigError
from longspan.optim import HostAdamW, StepInBackward, build_optimizer, host_bytes

pytestmark = pytest.mark.dist
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")

ROWS = 67
"""Of the first matrix: uneven over two and four processes; the last layer's three leave one of four without any."""


def build(world: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(128, ROWS), nn.Linear(ROWS, 3)).to(dtype)
    if world:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model


def run(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, seed: int = 0) -> None:
    torch.manual_seed(seed)  # stochastic rounding draws
    for step in range(first, last + 1):
        x = torch.randn(6, 128, generator=torch.Generator().manual_seed(step))
        model(x.to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in model.named_parameters()}


def one_process(kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    model = build(0, dtype)
    run(model, build_optimizer(kind, model, lr=1e-2, weight_decay=0.1), 1, 4)
    return whole(model)


def sharded(world: int, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    model = build(world, dtype)
    optimizer = build_optimizer(kind, model, lr=1e-2, weight_decay=0.1)
    with torch.compiler.set_stance("force_eager"):
        run(model, optimizer, 1, 4)
    return whole(model)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("adamw", torch.float32), ("adamw-host", torch.float32), ("adamw-host", torch.bfloat16)]
)
def test_shards_step_as_the_whole(run_ranks: Any, kind: str, dtype: torch.dtype, world: int) -> None:
    expected = one_process(kind, dtype)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2**-7, 2e-3)
    for found in run_ranks(world, sharded, world, kind, dtype):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol)


def states_of(world: int) -> tuple[bool, int, int]:
    """Step adamw and adamw-host on the same shards; return whether they agree bit for bit, and bytes."""
    results = [whole_after(world, kind) for kind in ("adamw", "adamw-host")]
    agree = all(torch.equal(results[0][0][name], value) for name, value in results[1][0].items())
    optimizer = results[1][1]
    held = sum(t.numel() * 4 for state in optimizer.state.values() for t in state.values() if t.dim())
    return agree, held, host_bytes(p for g in optimizer.param_groups for p in g["params"])


def whole_after(world: int, kind: str) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    model = build(world)
    optimizer = build_optimizer(kind, model, lr=1e-2, weight_decay=0.1)
    run(model, optimizer, 1, 3)
    return whole(model), optimizer


def test_host_states_are_those_of_the_shard(run_ranks: Any) -> None:
    count = sum(p.numel() for p in build(0).parameters())
    found = run_ranks(2, states_of, 2)
    assert all(agree and held == expected for agree, held, expected in found)
    assert sum(held for _, held, _ in found) == 12 * count


@needs_torchao
@pytest.mark.parametrize(("kind", "dtype"), [("adamw8bit", torch.float32), ("adamw-bf16-sr", torch.bfloat16)])
def test_low_bit_optimizers_step_shards(run_ranks: Any, kind: str, dtype: torch.dtype) -> None:
    with torch.compiler.set_stance("force_eager"):
        expected = one_process(kind, dtype)
    start = whole(build(0, dtype))
    first, second = run_ranks(2, sharded, 2, kind, dtype)
    for name, value in expected.items():
        assert torch.equal(first[name], second[name]), "what is gathered is the same everywhere"
        moved = (value.float() - start[name].float()).norm()  # blocks of 8-bit states differ, and so do draws
        assert (first[name].float() - value.float()).norm() <= 0.2 * moved, name


def refused(world: int) -> list[str]:
    said = []
    for make in (
        lambda: build_optimizer("adamw8bit", build(world, torch.bfloat16), lr=1e-3),
        lambda: build_optimizer("adamw-bf16-sr", build(0, torch.bfloat16), lr=1e-3),
        lambda: StepInBackward(HostAdamW(build(0).parameters())),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        said.append(str(caught.value))
    return said


@needs_torchao
def test_refusals(run_ranks: Any) -> None:
    for low, copies, inside in run_ranks(2, refused, 2):
        assert "adamw8bit cannot step bfloat16 parameters that are sharded, such as 0.weight" in low
        assert "0.weight has a copy in each of 2 processes, which would drift apart" in copies
        assert "Stepping in backward serves one process, but there are 2" in inside


def continued(world: int, kind: str, folder: str) -> bool:
    """Save a sharded run with torch's checkpoints, go on from the file, and compare with going on without it."""
    model = build(world)
    optimizer = build_optimizer(kind, model, lr=1e-2, weight_decay=0.1)
    run(model, optimizer, 1, 3)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    run(model, optimizer, 4, 6)

    twin = build(world)
    other = build_optimizer(kind, twin, lr=1e-2, weight_decay=0.1)
    run(twin, other, 9, 9)  # so that there are states to load into
    state: dict[str, Any] = {"model": twin.state_dict(), "optimizer": other.state_dict()}
    load(state, checkpoint_id=folder)
    twin.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    run(twin, other, 4, 6)
    after, expected = whole(twin), whole(model)
    return all(torch.equal(after[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["adamw", "adamw-host"])
def test_sharded_states_are_saved_and_loaded(run_ranks: Any, kind: str, tmp_path: Path) -> None:
    assert all(run_ranks(2, continued, 2, kind, str(tmp_path / "state")))


def shapes_of(world: int) -> list[tuple[Any, ...]]:
    optimizer = HostAdamW((model := build(world)).parameters())
    run(model, optimizer, 1, 1)
    first = optimizer.state_dict()["state"][0]
    own = optimizer.state[next(model.parameters())]
    return [
        (type(first[name]) is DTensor, tuple(first[name].shape), first[name].dtype, own[name].numel())
        for name in ("master", "exp_avg", "exp_avg_sq")
    ]


def test_saved_states_know_their_place(run_ranks: Any) -> None:
    rows = [34, 33]
    for rank, found in enumerate(run_ranks(2, shapes_of, 2)):
        assert found == [(True, (ROWS, 128), torch.float32, rows[rank] * 128)] * 3
    assert not dist.is_initialized()

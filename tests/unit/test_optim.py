"""Optimizers: exact against torch's own, their states saved and loaded, and refusals before anything is spent."""

from __future__ import annotations

import copy
import gc
import importlib.util
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from longspan.errors import ConfigError
from longspan.optim import KINDS, HostAdamW, build_optimizer, check_kind, host_bytes, set_learning_rate
from longspan.optim.memory import available_bytes
from longspan.optim.staging import Allowance, HostLane

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
NUMBERS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}


@pytest.fixture
def eager() -> Iterator[None]:
    """Let torchao's step run without compiling it."""
    with torch.compiler.set_stance("force_eager"):
        yield


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(37, 81), nn.Linear(81, 81, bias=False), nn.Linear(81, 5)).to(dtype)


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def gradients(model: nn.Module, step: int) -> None:
    """Give every parameter a gradient of the step, but the first one none in step 2: its count falls behind."""
    generator = torch.Generator().manual_seed(step)
    for index, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=generator).mul_(10.0 ** (index - 2)).to(p.dtype)
        if index == 0 and step == 2:
            p.grad = None


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        gradients(model, step)
        set_learning_rate(optimizer, 1e-2 / step)
        optimizer.step()
        optimizer.zero_grad()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("chunk_elements", [64, 1024, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_host_adamw_is_adamw_bit_for_bit(dtype: torch.dtype, chunk_elements: int) -> None:
    expected, found = build(dtype), build(dtype)
    start = copy.deepcopy(expected)
    run(expected, torch.optim.AdamW(grouped(expected), fused=True, **NUMBERS), range(1, 6))
    run(found, HostAdamW(grouped(found), **NUMBERS, chunk_elements=chunk_elements), range(1, 6))
    assert equal(found, expected)
    assert all(not torch.equal(p, q) for p, q in zip(start.parameters(), found.parameters(), strict=True))
    plain = build(dtype)
    run(plain, torch.optim.AdamW(grouped(plain), foreach=False, fused=False, **NUMBERS), range(1, 6))
    for p, q in zip(plain.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=1e-7)


def test_bfloat16_parameters_are_rounded_float32_masters() -> None:
    found = build(torch.bfloat16)
    masters = copy.deepcopy(found).float()
    reference = torch.optim.AdamW(grouped(masters), fused=True, **NUMBERS)
    optimizer = HostAdamW(grouped(found), **NUMBERS, chunk_elements=128)
    for step in range(1, 6):
        gradients(found, step)
        for master, p in zip(masters.parameters(), found.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        reference.step()
        for master, p in zip(masters.parameters(), found.parameters(), strict=True):
            assert torch.equal(p, master.bfloat16())
            if step > 2 or p is not next(found.parameters()):
                assert torch.equal(optimizer.state[p]["master"], master)
    assert any(not torch.equal(optimizer.state[p]["master"], p.float()) for p in found.parameters()), (
        "masters hold more than the parameters"
    )


def test_host_memory_is_twelve_bytes_per_parameter() -> None:
    model = build(torch.bfloat16)
    optimizer = HostAdamW(grouped(model), **NUMBERS)
    run(model, optimizer, range(1, 2))
    held = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    count = sum(p.numel() for p in model.parameters())
    assert sum(t.numel() * t.element_size() for t in held) == 12 * count == host_bytes(model.parameters())
    assert host_bytes(build(torch.float64).parameters()) == 24 * count


KIND_DTYPES = [
    ("adamw", torch.float32),
    ("adamw-host", torch.float32),
    ("adamw-host", torch.bfloat16),
    pytest.param("adamw8bit", torch.float32, marks=needs_torchao),
    pytest.param("adamw8bit", torch.bfloat16, marks=needs_torchao),
    pytest.param("adamw-bf16-sr", torch.bfloat16, marks=needs_torchao),
]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("kind", "dtype"), KIND_DTYPES)
def test_a_loaded_optimizer_goes_on_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Any) -> None:
    model = build(dtype)
    optimizer = build_optimizer(kind, model, lr=1e-2, weight_decay=0.1)
    torch.manual_seed(0)
    run(model, optimizer, range(1, 4))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", mmap=True, weights_only=kind in ("adamw", "adamw-host"))
    twin = build(dtype)
    twin.load_state_dict(saved["model"])
    other = build_optimizer(kind, twin, lr=3.0)
    other.load_state_dict(saved["optimizer"])
    for m, o in ((model, optimizer), (twin, other)):
        torch.manual_seed(1)
        run(m, o, range(4, 7))
    assert equal(model, twin)
    forgetful = build(dtype)
    forgetful.load_state_dict(saved["model"])
    torch.manual_seed(1)
    run(forgetful, build_optimizer(kind, forgetful, lr=1e-2, weight_decay=0.1), range(4, 7))
    assert not equal(model, forgetful), "the state matters"


def test_loading_copies() -> None:
    model = build()
    optimizer = HostAdamW(grouped(model), **NUMBERS)
    run(model, optimizer, range(1, 3))
    state = optimizer.state_dict()
    before = copy.deepcopy(state["state"])
    other = HostAdamW(grouped(twin := build()), **NUMBERS)
    other.load_state_dict(state)
    run(twin, other, range(3, 5))
    for index, values in before.items():
        assert all(torch.equal(value, state["state"][index][name]) for name, value in values.items())


def test_a_state_of_something_else_is_refused() -> None:
    model = build()
    optimizer = HostAdamW(grouped(model), **NUMBERS)
    with pytest.raises(ConfigError, match=r"groups of \[5\] parameters, the model of \[3, 2\]"):
        optimizer.load_state_dict(HostAdamW(model.parameters()).state_dict())
    theirs = torch.optim.AdamW(grouped(model), **NUMBERS)
    run(model, theirs, range(1, 2))
    with pytest.raises(ConfigError, match=r"parameter 0 has master of shape None, expected \(81, 37\)"):
        optimizer.load_state_dict(theirs.state_dict())


def test_a_gradient_is_let_go_once_it_is_on_the_host() -> None:
    parameter = nn.Parameter(torch.randn(300))
    optimizer = HostAdamW([parameter], chunk_elements=64, waiting_bytes=8)  # less than a gradient: one at a time
    for _ in range(3):
        parameter.grad = torch.randn(300)
        gone = weakref.ref(parameter.grad)
        optimizer.submit(parameter, optimizer.param_groups[0])
        parameter.grad = None
        optimizer.finish()
        gc.collect()
        assert gone() is None


def test_a_gradient_does_not_wait_for_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostLane, "fetch", lambda self, source, ready: source.clone())  # as where it is carried
    parameter = nn.Parameter(torch.randn(100))
    optimizer = HostAdamW([parameter], chunk_elements=64)
    parameter.grad = torch.randn(100)
    gone = weakref.ref(parameter.grad)
    with optimizer._lanes_of(parameter).computing:
        optimizer.submit(parameter, optimizer.param_groups[0])
        parameter.grad = None
        deadline_s = time.monotonic() + 10
        while gone() is not None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert gone() is None
    optimizer.finish()


@pytest.mark.parametrize("inside", [False, True])
def test_a_step_ends_with_what_is_on_its_way_back(monkeypatch: pytest.MonkeyPatch, inside: bool) -> None:
    """Copies back that arrive as late as they may: when the caller's stream waits for them."""
    expected, found = build(), build()
    run(expected, HostAdamW(grouped(expected), **NUMBERS), range(3, 6))
    back: dict[HostLane, list[tuple[Tensor, Tensor]]] = {}

    def settle(self: HostLane) -> None:
        for target, result in back.pop(self, []):
            target.copy_(result)

    def store(self: HostLane, result: Tensor, target: Tensor) -> None:
        back.setdefault(self, []).append((target, result.clone()))

    monkeypatch.setattr(HostLane, "settle", settle)
    monkeypatch.setattr(HostLane, "store", store)
    optimizer = HostAdamW(grouped(found), **NUMBERS, chunk_elements=64)
    if not inside:
        run(found, optimizer, range(3, 6))
    for step in range(3, 6) if inside else ():
        set_learning_rate(optimizer, 1e-2 / step)
        gradients(found, step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.submit(parameter, group)
                parameter.grad = None
        optimizer.finish()
    assert equal(found, expected)


def test_an_error_in_a_thread_reaches_the_caller_and_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    optimizer = HostAdamW(grouped(model), **NUMBERS, chunk_elements=64, waiting_bytes=8)
    seen: set[str] = set()

    def broken(self: HostLane, source: Tensor, ready: Any) -> Tensor:
        seen.add(threading.current_thread().name)
        raise OSError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(HostLane, "fetch", broken)
        gradients(model, 1)
        with pytest.raises(OSError, match="no more memory"):
            optimizer.step()
    assert seen and all(name.startswith("longspan-lane") for name in seen)
    gradients(model, 1)
    optimizer.step()


def test_autograd_notices_a_step_that_comes_too_early() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = HostAdamW([weight])
    loss = (torch.randn(2, 4, requires_grad=True) @ weight).sum()
    weight.grad = torch.ones(4, 4)
    optimizer.submit(weight, optimizer.param_groups[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.finish()


def test_an_allowance_makes_wait_but_never_forever() -> None:
    allowance = Allowance(10)
    allowance.take(50)  # alone, it may be larger
    taken = threading.Event()

    def second() -> None:
        allowance.take(6)
        taken.set()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert not taken.wait(0.1)
    allowance.give(50)
    assert taken.wait(5)
    allowance.take(4)
    thread.join(5)


def test_parameters_without_elements() -> None:
    empty, full = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(2))
    optimizer = HostAdamW([empty, full])
    for p in (empty, full):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert full.detach().lt(1).all() and not optimizer.state[empty]["master"].numel()


@needs_torchao
@pytest.mark.usefixtures("eager")
def test_low_bit_optimizers_follow_adamw() -> None:
    expected = build()
    start = copy.deepcopy(expected)
    run(expected, build_optimizer("adamw", expected, lr=1e-2, weight_decay=0.1), range(1, 6))
    for kind, dtype, bound in (("adamw8bit", torch.float32, 0.05), ("adamw-bf16-sr", torch.bfloat16, 0.2)):
        found = build(dtype)
        run(found, build_optimizer(kind, found, lr=1e-2, weight_decay=0.1), range(1, 6))
        for p, q, s in zip(expected.parameters(), found.parameters(), start.parameters(), strict=True):
            moved = (p - s).norm()
            assert 0 < (p - q.float()).norm() <= bound * moved, (kind, float((p - q).norm() / moved))


@needs_torchao
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["adamw8bit", "adamw-bf16-sr"])
def test_small_updates_are_not_lost_to_rounding(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
    optimizer = build_optimizer(kind, nn.ParameterList([parameter]), lr=1e-4)
    for _ in range(10):  # each update is a fortieth of the distance to the next number below 1
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = float((1 - parameter.detach().double()).mean())
    assert moved == pytest.approx(10 * 1e-4, rel=0.1)


@needs_torchao
@pytest.mark.slow
def test_compiled_as_users_run_it() -> None:
    found, expected = build(torch.bfloat16), build(torch.bfloat16)
    run(found, build_optimizer("adamw8bit", found, lr=1e-2), range(1, 3))
    with torch.compiler.set_stance("force_eager"):
        run(expected, build_optimizer("adamw8bit", expected, lr=1e-2), range(1, 3))
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2**-7, atol=1e-3)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build()
    for kind in ("adamw", "adamw-host"):
        groups = build_optimizer(kind, model, lr=1e-3, weight_decay=0.3).param_groups
        assert [g["weight_decay"] for g in groups] == [0.3, 0.0]
        assert {p.dim() for p in groups[0]["params"]} == {2} and {p.dim() for p in groups[1]["params"]} == {1}
        assert all(g["lr"] == 1e-3 and g["betas"] == (0.9, 0.95) and g["eps"] == 1e-8 for g in groups)
    assert build_optimizer("adamw", model, lr=1).defaults["fused"] is True


def test_frozen_parameters_are_left_out() -> None:
    model = build()
    model[0].requires_grad_(False)
    optimizer = build_optimizer("adamw-host", model, lr=1e-3)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model[1:].parameters()}
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="No parameter requires a gradient"):
        build_optimizer("adamw", model, lr=1e-3)


@pytest.mark.parametrize(
    ("kind", "dtype", "said"),
    [
        ("sgd", torch.float32, "Unknown optimizer 'sgd'; use adamw, adamw8bit, adamw-bf16-sr, adamw-host"),
        ("adamw-bf16-sr", torch.float32, r"but 0\.weight is float32: set model\.dtype to bfloat16"),
        ("adamw8bit", torch.float64, r"but 0\.weight is float64: set model\.dtype to float32 or bfloat16"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, said: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=said):
        build_optimizer(kind, build(dtype), lr=1e-3)


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for kind in KINDS:
        if kind in ("adamw8bit", "adamw-bf16-sr"):
            with pytest.raises(ConfigError, match=rf"{kind} needs torchao, .* pip install 'torchao"):
                check_kind(kind)
        else:
            check_kind(kind)


def test_a_host_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    available = host_bytes(model.parameters())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    build_optimizer("adamw-host", model, lr=1e-3)
    available -= 1
    with pytest.raises(ConfigError, match=r"needs 0\.0 GiB of host memory .* 0\.0 GiB are available"):
        build_optimizer("adamw-host", model, lr=1e-3)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert available_bytes(tmp_path) == 1000
    stat = "anon 300\ninactive_file 120\nactive_file 40\n"
    for name, text in {"memory.max": "900\n", "memory.current": "500\n", "memory.stat": stat}.items():
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == 900 - 500 + 120 + 40
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("9000\n")
    assert available_bytes(tmp_path) == 1000


def test_parameters_that_the_host_cannot_serve() -> None:
    odd = nn.ParameterDict({"w": nn.Parameter(torch.randn(3, 4).t())})
    with pytest.raises(ConfigError, match=r"w has strides \(1, 4\) for shape \(4, 3\)"):
        build_optimizer("adamw-host", odd, lr=1e-3)
    with pytest.raises(ConfigError, match="is on meta"):
        build_optimizer("adamw-host", nn.Linear(2, 2, device="meta"), lr=1e-3)

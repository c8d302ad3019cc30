"""Host states under a GPU's parameters: bit-equal with the host alone, whatever the streams and the order."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan.errors import ConfigError
from longspan.keep import Keep, Memory
from longspan.optim import HostAdamW, StepInBackward, build_optimizer, set_learning_rate
from longspan.optim.staging import PinnedLane

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")

NUMBERS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = [(1 << 20, 5), (4099,), (777, 1023), (1,), (64, 64)]
"""The first is more than one chunk; odd sizes leave a rest in the last."""


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def on_the_host(dtype: torch.dtype, steps: int) -> tuple[list[nn.Parameter], HostAdamW]:
    trained = parameters(dtype)
    optimizer = HostAdamW(trained, **NUMBERS)
    for step in range(steps):
        for p, gradient in zip(trained, gradients(step, dtype), strict=True):
            p.grad = gradient
        optimizer.step()
    return trained, optimizer


@pytest.mark.parametrize("chunk_elements", [1 << 16, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_parameters_equal_the_hosts_bit_for_bit(dtype: torch.dtype, chunk_elements: int) -> None:
    expected, reference = on_the_host(dtype, 4)
    trained = [nn.Parameter(p.detach().cuda()) for p in parameters(dtype)]
    optimizer = HostAdamW(trained, **NUMBERS, chunk_elements=chunk_elements)
    for step in range(4):
        for p, gradient in zip(trained, gradients(step, dtype), strict=True):
            p.grad = gradient.cuda()
        optimizer.step()
    for p, q in zip(trained, expected, strict=True):
        assert torch.equal(p.cpu(), q)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            state = optimizer.state[p][name]
            assert state.device.type == "cpu" and not state.is_pinned()
            assert torch.equal(state, reference.state[q][name])


def busy(milliseconds: float) -> None:
    """Keep the current stream occupied, so that whatever does not wait for it comes too early."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_gradients_nor_results_are_read_too_early(dtype: torch.dtype) -> None:
    """Gradients arrive late on the caller's stream, which reads the parameter until then and right after `finish`."""
    expected, _ = on_the_host(dtype, 6)
    trained = [nn.Parameter(p.detach().cuda()) for p in parameters(dtype)]
    optimizer = HostAdamW(trained, **NUMBERS, chunk_elements=1 << 18, waiting_bytes=1 << 20)
    before, after = [], []
    for step in range(6):
        ready = [gradient.cuda() for gradient in gradients(step, dtype)]
        torch.cuda.synchronize()
        for p, gradient in zip(trained, ready, strict=True):
            late = torch.full_like(gradient, float("nan"))
            busy(3)
            late.copy_(gradient)
            p.grad = late
            before.append(p.detach().clone())  # a reader that the write must not overtake
            optimizer.submit(p, optimizer.param_groups[0])
            p.grad = None
            del late  # memory that the caller's stream may have again as soon as it is let go
            torch.full((gradient.numel(),), float("nan"), device="cuda", dtype=dtype)
        optimizer.finish()
        after += [p.detach().clone() for p in trained]
    for p, q in zip(trained, expected, strict=True):
        assert torch.equal(p.cpu(), q)
    count = len(SHAPES)
    start = [p.detach().cuda() for p in parameters(dtype)]
    for old, new in zip(before, start + after[:-count], strict=True):
        assert torch.equal(old, new)


def build(dtype: torch.dtype, tied: bool = False) -> Any:
    torch.manual_seed(11)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1031, tie_word_embeddings=tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype).cuda()


def train(kind: str, inside: bool, tied: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Take four steps of which a GPU makes the same bits each time.

    Kernels that add up the gradient of q in any order do not: a dozen of its elements rounded the other way move the
    norms of later steps by several percent, as Adam gives every parameter a step of its own size.
    """
    model = build(torch.bfloat16, tied)
    handle = longspan.prepare(model, 1, memory=Memory(128, Keep.X_O), kernel="reference")
    optimizer: Any = build_optimizer(kind, model, lr=1.0, weight_decay=0.1)
    if kind == "adamw8bit":
        optimizer.bf16_stochastic_round = False
    stepping = StepInBackward(optimizer) if inside else None
    norms = []
    for step in range(1, 5):
        ids = torch.randint(1031, (1, 300), generator=torch.Generator().manual_seed(step))
        part = handle.shard({"input_ids": ids, "labels": ids.clone()})
        part = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in part.items()}
        if stepping is not None:
            stepping.begin(1e-2 / step)
        model(**part).loss.backward()
        if stepping is not None:
            norms.append(float(stepping.norm()))
            stepping.finish()
        else:
            squares = [p.grad.float().square().sum() for p in model.parameters() if p.grad is not None]
            norms.append(float(torch.stack(squares).sum().sqrt()))
            set_learning_rate(optimizer, 1e-2 / step)
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, norms


@contextmanager
def late_copies() -> Iterator[None]:
    """Hold up what comes back from the host: whoever does not wait for it has the parameters of the step before."""
    store = PinnedLane.store

    def late(lane: PinnedLane, result: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(lane._stream):
            busy(1)
        store(lane, result, target)

    with patch.object(PinnedLane, "store", late):
        yield


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "adamw-host", pytest.param("adamw8bit", marks=needs_torchao)])
def test_inside_equals_after(kind: str, tied: bool) -> None:
    expected, norms = train(kind, False, tied)
    again, _ = train(kind, False, tied)
    with late_copies():
        found, others = train(kind, True, tied)
    for name, value in expected.items():
        assert torch.equal(again[name], value), f"{name}: steps after backward are not repeatable"
        assert torch.equal(found[name], value), name
    assert others == pytest.approx(norms, rel=1e-5)


def test_gpu_memory_beyond_parameters_is_what_waits() -> None:
    """Many layers' gradients never exist together, and no state is on the GPU."""
    layers, width = 40, 2048
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).to("cuda", torch.bfloat16)
    layer_bytes = width * width * 2
    optimizer = HostAdamW(model.parameters(), lr=1e-4, waiting_bytes=3 * layer_bytes)
    stepping = StepInBackward(optimizer)
    x = torch.randn(8, width, device="cuda", dtype=torch.bfloat16)
    for number in range(2):
        torch.cuda.synchronize()
        start_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        stepping.begin(1e-4)
        model(x).square().mean().backward()
        stepping.finish()
        peak_bytes = torch.cuda.max_memory_allocated() - start_bytes
        assert number == 0 or peak_bytes <= 8 * layer_bytes < layers * layer_bytes, peak_bytes / layer_bytes
    assert sum(t.numel() * 4 for s in optimizer.state.values() for t in s.values() if t.dim()) == 12 * layers * width**2


def test_backward_goes_on_while_the_host_computes() -> None:
    """Submitting returns at once; only what exceeds the allowance waits."""
    parameter = nn.Parameter(torch.zeros(1 << 24, device="cuda"))
    optimizer = HostAdamW([parameter], lr=1e-3)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.cuda.synchronize()
    parameter.grad = torch.ones_like(parameter)
    start_s = time.perf_counter()
    optimizer.submit(parameter, optimizer.param_groups[0])
    submitted_s = time.perf_counter() - start_s
    optimizer.finish()
    torch.cuda.synchronize()
    assert submitted_s < (time.perf_counter() - start_s) / 2


def test_adamw_is_fused_and_agrees_with_the_host() -> None:
    model = nn.Linear(300, 200).cuda()
    twin = copy.deepcopy(model)
    fused, host = build_optimizer("adamw", model, lr=1e-2), build_optimizer("adamw-host", twin, lr=1e-2)
    assert fused.defaults["fused"] is True
    for step in range(5):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).cuda()
            q.grad = p.grad.clone()
        fused.step()
        host.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_parameters_on_two_kinds_of_device_are_refused_inside() -> None:
    mixed = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="cuda"))]
    with pytest.raises(ConfigError, match="found cpu, cuda:0"):
        StepInBackward(HostAdamW(mixed))


@pytest.mark.parametrize("setting", ["", "PYTORCH_ALLOC_CONF=expandable_segments:False"])
def test_the_allocator_setting_takes_effect_after_torch_is_imported(setting: str) -> None:
    """The command line sets it in a process that has imported torch, but not yet used the GPU."""
    code = (
        "import os, sys\n"
        "for name in ('PYTORCH_CUDA_ALLOC_CONF', 'PYTORCH_ALLOC_CONF'): os.environ.pop(name, None)\n"
        "if sys.argv[1]: os.environ.update([sys.argv[1].split('=')])\n"
        "import torch, longspan\n"
        "from longspan.cli.allocator import choose_allocator\n"
        "choose_allocator()\n"
        "block = torch.ones(1 << 22, device='cuda')\n"
        "print(any(segment.get('is_expandable') for segment in torch.cuda.memory_snapshot()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, setting], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(not setting)

"""The choice of kernels by name, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kernel_cases import CASES, relative_error
from longspan.errors import KernelError
from longspan.kernels import aten_flash, cudnn, fa4, flash_attn, reference
from longspan.kernels.guard import INT32_ELEMENTS, Guard
from longspan.kernels.protocol import Request
from longspan.kernels.select import available, pick

CPU = Request(torch.device("cpu"), torch.float32, 64, 64, varlen=True, bottom_right=True)
GPU = Request(torch.device("cuda"), torch.bfloat16, 128, 128, varlen=True, bottom_right=True)
OURS = {"reference", "cpu", "aten-flash", "cudnn", "fa4", "fa3", "fa2"}
PACKAGES = {"fa4": "flash_attn.cute.interface", "fa3": "flash_attn_interface", "fa2": "flash_attn.flash_attn_interface"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a CUDA device, without any package for it."""
    for module in (aten_flash, cudnn, fa4, flash_attn):
        monkeypatch.setattr(
            module, "device_problem", lambda device, oldest=(8, 0): None if device.type == "cuda" else "it needs CUDA"
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    for name in ("flash_attn", "flash_attn.cute", *PACKAGES.values()):
        monkeypatch.setitem(sys.modules, name, None)


def install(monkeypatch: pytest.MonkeyPatch, *kernels: str) -> None:
    for name in ("flash_attn", "flash_attn.cute", *(PACKAGES[kernel] for kernel in kernels)):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.mark.parametrize(
    ("name", "kernel"), [("auto", "cpu"), ("sdpa", "cpu"), ("cpu", "cpu"), ("reference", "reference")]
)
def test_names_on_a_cpu(name: str, kernel: str) -> None:
    picked = pick(name, CPU)
    assert picked.name == kernel
    assert isinstance(picked, Guard)
    assert picked.limit == INT32_ELEMENTS


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("auto", "cudnn+aten-flash"),
        ("sdpa", "cudnn+aten-flash"),
        ("aten-flash", "aten-flash"),
        ("reference", "reference"),
    ],
)
def test_names_on_a_gpu_without_packages(name: str, kernel: str, gpu: None) -> None:
    assert pick(name, GPU).name == kernel


def test_names_on_a_gpu_with_packages(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *PACKAGES)
    chosen = {"auto": "fa4", "sdpa": "cudnn+aten-flash", "fa2": "fa2", "fa3": "fa3", "fa4": "fa4"}
    chosen |= {f"flash_attention_{version}": f"fa{version}" for version in (2, 3, 4)}
    assert {name: pick(name, GPU).name for name in chosen} == chosen
    assert available("cuda") == dict.fromkeys(OURS) | {"cpu": "it runs on CPUs, not on cuda"}


def test_cudnn_is_left_out_where_it_can_do_no_call(gpu: None) -> None:
    wide_heads = Request(GPU.device, GPU.dtype, 256, 256)
    assert pick("auto", wide_heads).name == "aten-flash"
    assert pick("sdpa", wide_heads).name == "aten-flash"
    assert pick("cudnn", Request(GPU.device, GPU.dtype, 128, 128)).name == "cudnn"


def test_values_of_another_head_dim_are_padded(gpu: None) -> None:
    assert pick("auto", Request(GPU.device, GPU.dtype, 192, 128)).name == "aten-flash"
    assert pick("auto", Request(GPU.device, GPU.dtype, 24, 16, varlen=True)).name == "cudnn+aten-flash"
    for name in ("auto", "reference"):
        case = CASES["packed, narrow values"]
        q, k, v, dout = operands = case.operands()
        kernel = pick(name, Request(q.device, q.dtype, 16, 8, varlen=True, bottom_right=True))
        out, lse = kernel.forward(q, k, v, case.block, case.score)
        grads = kernel.backward(dout, q, k, v, out, lse, case.block, case.score)
        true = case.truth(operands)
        assert out.is_contiguous()
        assert relative_error(out, true["out"]) <= 1e-10
        assert max(relative_error(x, true[n]) for n, x in zip(("dq", "dk", "dv"), grads, strict=True)) <= 1e-10


def test_capped_scores_and_windows_get_the_kernels_that_do_them(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    capped, windowed = replace(GPU, softcap=True), replace(GPU, window=True)
    assert pick("auto", replace(CPU, window=True)).name == "cpu"
    assert pick("auto", replace(CPU, softcap=True)).name == "reference"
    assert pick("auto", windowed).name == "cudnn+aten-flash", "cudnn where a call shows no window"
    with pytest.raises(KernelError, match=r"fa4: .*; aten-flash: it does not cap scores; fa3: .*serve .*: reference\."):
        pick("auto", capped)
    with pytest.raises(KernelError, match="cudnn: it does not take windows"):
        pick("cudnn", replace(windowed, varlen=False, bottom_right=False))
    with pytest.raises(KernelError, match="cpu: it does not cap scores"):
        pick("cpu", replace(CPU, softcap=True))
    install(monkeypatch, "fa3", "fa2")
    assert pick("auto", capped).name == "fa3"
    install(monkeypatch, *PACKAGES)
    assert (pick("auto", capped).name, pick("auto", windowed).name) == ("fa4", "fa4")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("eager", "it needs a mask of all queries by all keys"),
        ("paged|eager", "paged attention is for generation, and it needs a mask"),
        ("paged|sdpa", "paged attention is for generation"),
        ("paged|flash_attention_2", "paged attention is for generation"),
        ("flex_attention", "it has no backward that starts from a final log-sum-exp"),
        ("kernels-community/flash-attn2", "kernels from the Hub are not supported"),
        ("kernels-community/vllm-flash-attn3@main", "kernels from the Hub are not supported"),
        ("org/name@v1:flash_attn_func", "kernels from the Hub are not supported"),
        ("org/name:flash_attn_func", "kernels from the Hub are not supported"),
        ("flash_attention_2", "fa2: it runs on CUDA devices, not on cpu"),
        ("flash_attention_3", "fa3: it runs on CUDA devices, not on cpu"),
        ("flash_attention_4", "fa4: it runs on CUDA devices, not on cpu"),
        ("aten-flash", "aten-flash: it runs on CUDA devices, not on cpu"),
        ("cudnn", "cudnn: it runs on CUDA devices, not on cpu"),
        ("flash_attention_5", "There is no attention kernel 'flash_attention_5'"),
        ("", "There is no attention kernel ''"),
    ],
)
def test_names_refused_on_a_cpu_list_what_is_usable(name: str, says: str) -> None:
    with pytest.raises(KernelError) as refused:
        pick(name, CPU)
    assert says in str(refused.value)
    assert name in str(refused.value)
    assert "Kernels that can serve float32, head_dim 64, on cpu" in str(refused.value)
    assert str(refused.value).endswith("reference, cpu.")


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4", "flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_a_missing_package_is_never_replaced(name: str, gpu: None) -> None:
    with pytest.raises(KernelError, match=r"cannot be imported \(ModuleNotFoundError.*can serve .*: reference, aten"):
        pick(name, GPU)


@pytest.mark.parametrize(
    ("name", "request_", "says"),
    [
        ("cudnn", GPU, "it does not take packed documents"),
        ("cudnn", Request(GPU.device, GPU.dtype, 64, 64, bottom_right=True), "only with as many keys as queries"),
        ("cpu", GPU, "it runs on CPUs, not on cuda"),
        ("auto", Request(GPU.device, torch.float32, 64, 64), "it computes in bf16 and fp16, not float32"),
        ("aten-flash", Request(GPU.device, GPU.dtype, 264, 264), "a multiple of 8 up to 256, not 264"),
        ("auto", Request(torch.device("mps"), torch.float32, 64, 64), "it runs on CPUs, not on mps"),
        ("reference", Request(torch.device("cpu"), torch.int64, 64, 64), "floating-point"),
    ],
)
def test_kernels_that_cannot_serve_a_request(name: str, request_: Request, says: str, gpu: None) -> None:
    with pytest.raises(KernelError, match=says):
        pick(name, request_)


def test_availability_gives_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(available("cpu")) == OURS
    assert {name for name, why in available(torch.device("cpu")).items() if why is None} == {"reference", "cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert reference.Reference.missing(torch.device("cuda")) == "this process sees no CUDA device"

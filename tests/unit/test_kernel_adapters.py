"""The CUDA adapters on a CPU: stand-ins with the vendors' signatures compute by the reference and check each call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import CASES, Case, packed, relative_error
from longspan.errors import KernelError
from longspan.kernels import aten_flash, cuda, cudnn, fa4, flash_attn
from longspan.kernels.protocol import Kernel, Request
from longspan.kernels.reference import Reference
from longspan.mask import Block

REFERENCE = Reference()
DENSE = ["causal, grouped, 63 tokens", "full", "transposed square", "expanded gradient"]
MORE = ["causal, more keys", "full, more keys", "fused"]
PACKED = ["packed", "packed, more keys", "packed, full", "packed, fused"]
SQUARE = {"transposed square": Case(Block(True), 7, 7, rows=2, strides="transposed")}


class Calls(list[str]):
    """Names of the stand-ins that ran."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Let the adapters run on a CPU in fp64, with stand-ins for what they call, and poisoned memory."""
    for module in (aten_flash, cudnn, fa4, flash_attn):
        monkeypatch.setattr(module, "device_problem", lambda device, oldest=(8, 0): None)
        monkeypatch.setattr(module, "operand_problem", lambda request, largest_head_dim: None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    seen = Calls()
    for name, functions in (
        ("flash_attn.cute.interface", fa4_functions(seen)),
        ("flash_attn.flash_attn_interface", fa2_functions(seen)),
        ("flash_attn_interface", fa3_functions(seen)),
    ):
        for parent in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    torch.use_deterministic_algorithms(True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        for function in aten_functions(seen):
            library.impl(function.__name__, function, "CPU")
        yield seen
    torch.use_deterministic_algorithms(False)


def row(x: Tensor, cu: Any) -> Tensor:
    return x if cu[0] is None else x[None]


def call_forward(
    q: Tensor, k: Tensor, v: Tensor, cu: Any, longest: Any, causal: bool, scale: Any
) -> tuple[Tensor, Tensor]:
    """Compute a vendor's forward: [B, S, H, D] dense, [T, H, D] packed with lse [H, T]."""
    block = check_lengths(q, k, cu, longest, causal)
    assert not causal or cu[0] is not None or q.shape[1] <= k.shape[1]
    out, lse = REFERENCE.forward(row(q, cu), row(k, cu), row(v, cu), block, scale)
    return (out, lse) if cu[0] is None else (out[0], lse[0])


def call_backward(
    operands: tuple[Tensor, ...], cu: Any, longest: Any, causal: bool, scale: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a vendor's backward from dout, q, k, v, out and lse."""
    dout, q, k, v, out, lse = operands
    assert lse.is_contiguous()
    block = check_lengths(q, k, cu, longest, causal)
    dout, q, k, v, out, lse = (row(x, cu) for x in operands)
    dq, dk, dv = REFERENCE.backward(dout, q, k, v, out, lse, block, scale)
    return (dq, dk, dv) if cu[0] is None else (dq[0], dk[0], dv[0])


def check_lengths(q: Tensor, k: Tensor, cu: Any, longest: Any, causal: bool) -> Block:
    if cu[0] is None:
        assert cu[1] is None
        assert q.dim() == k.dim() == 4
        return Block(causal)
    assert q.dim() == k.dim() == 3
    assert cu[0].dtype == cu[1].dtype == torch.int32
    assert all(type(x) is int for x in longest)
    assert longest == tuple(int(x.diff().max()) for x in cu)
    return Block(causal, tuple(cu[0].tolist()), tuple(cu[1].tolist()))


def aten_functions(seen: Calls) -> tuple[Any, ...]:
    empty = torch.empty(0)

    def _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
        *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, **later,
    ):  # fmt: skip
        seen.append("flash forward")
        assert (dropout_p, return_debug_mask) == (0.0, False)
        assert (window_size_left, window_size_right, seqused_k, alibi_slopes) == (None,) * 4
        if cum_seq_q is None:
            assert (max_q, max_k) == (query.shape[1], key.shape[1])
        cu, longest = (cum_seq_q, cum_seq_k), (max_q, max_k)
        return *call_forward(query, key, value, cu, longest, is_causal, scale), empty, empty, empty

    def _flash_attention_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        seen.append("flash backward")
        assert (dropout_p, window_size_left, window_size_right) == (0.0, None, None)
        assert rng_state.dtype == torch.uint64
        assert rng_state.shape == (2,)
        operands = (grad_out, query, key, value, out, logsumexp)
        return call_backward(operands, (cum_seq_q, cum_seq_k), (max_q, max_k), is_causal, scale)

    def _scaled_dot_product_cudnn_attention(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False,
        *, scale: Any = None,
    ):  # fmt: skip
        seen.append("cudnn forward")
        assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
        assert not is_causal or query.shape[2] == key.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = REFERENCE.forward(q, k, v, Block(is_causal), scale)
        state = torch.zeros((), dtype=torch.int64)
        sizes = (query.shape[2], key.shape[2])
        return out.transpose(1, 2), lse.unsqueeze(-1), empty, empty, *sizes, state, state, empty

    def _scaled_dot_product_cudnn_attention_backward(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k,
        max_q, max_k, dropout_p, is_causal, *, scale: Any = None,
    ):  # fmt: skip
        seen.append("cudnn backward")
        assert (attn_bias, cum_seq_q, cum_seq_k, dropout_p) == (None, None, None, 0.0)
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        assert grad_out.stride() == out.stride()
        assert philox_seed.dtype == philox_offset.dtype == torch.int64
        assert philox_seed.item() == philox_offset.item() == 0
        assert logsumexp.shape == (*query.shape[:3], 1)
        assert logsumexp.is_contiguous()
        dout, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        grads = REFERENCE.backward(dout, q, k, v, out, logsumexp.squeeze(-1), Block(is_causal), scale)
        return tuple(x.transpose(1, 2) for x in grads)

    return (
        _flash_attention_forward,
        _flash_attention_backward,
        _scaled_dot_product_cudnn_attention,
        _scaled_dot_product_cudnn_attention_backward,
    )


def fa4_functions(seen: Calls) -> tuple[Any, ...]:
    def _flash_attn_fwd(
        *, q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, return_lse=False,
    ):  # fmt: skip
        seen.append("fa4 forward")
        assert return_lse is True
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return *call_forward(q, k, v, cu, longest, causal, softmax_scale), None, None, None

    def _flash_attn_bwd(
        *, q, k, v, out, dout, lse, softmax_scale=None, causal=False, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False,
    ):  # fmt: skip
        seen.append("fa4 backward")
        assert dout.is_contiguous()
        assert deterministic is True  # as the process asked for
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return *call_backward((dout, q, k, v, out, lse), cu, longest, causal, softmax_scale), None

    return _flash_attn_fwd, _flash_attn_bwd


def fa2_functions(seen: Calls) -> tuple[Any, ...]:
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        seen.append("fa2 forward")
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert (alibi_slopes, return_softmax) == (None, False)
        return *call_forward(q, k, v, (None, None), (None, None), causal, softmax_scale), None, None

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        seen.append("fa2 varlen forward")
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return *call_forward(q, k, v, cu, longest, causal, softmax_scale), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        seen.append("fa2 backward")
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert deterministic is True
        grads = call_backward((dout, q, k, v, out, softmax_lse), (None,) * 2, (None,) * 2, causal, softmax_scale)
        write((dq, dk, dv), grads)
        return softmax_lse

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        seen.append("fa2 varlen backward")
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        write((dq, dk, dv), call_backward((dout, q, k, v, out, softmax_lse), cu, longest, causal, softmax_scale))
        return softmax_lse

    return _flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward


def fa3_functions(seen: Calls) -> tuple[Any, ...]:
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
        num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        seen.append("fa3 forward")
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return *call_forward(q, k, v, cu, longest, causal, softmax_scale), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        seen.append("fa3 backward")
        assert deterministic is True
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        write((dq, dk, dv), call_backward((dout, q, k, v, out, softmax_lse), cu, longest, is_causal, softmax_scale))
        return softmax_lse

    return _flash_attn_forward, _flash_attn_backward


def write(into: tuple[Any, ...], grads: tuple[Tensor, ...]) -> None:
    for x, grad in zip(into, grads, strict=True):
        x.copy_(grad)


def errors(kernel: Kernel, case: Case) -> dict[str, float]:
    q, k, v, dout = operands = case.operands()
    out, lse = kernel.forward(q, k, v, case.block, case.scale)
    kept, kept_lse = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, lse))  # as a merge may leave them
    dq, dk, dv = kernel.backward(dout, q, k, v, kept, kept_lse, case.block, case.scale)
    found, true = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, case.truth(operands)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in true.items()}
    return {name: relative_error(found[name], true[name]) for name in true}


ADAPTERS: list[tuple[Kernel, str, list[str]]] = [
    (aten_flash.AtenFlash(), "flash", [*DENSE, *MORE, *PACKED]),
    (cudnn.Cudnn(), "cudnn", [*DENSE, "full, more keys"]),
    (fa4.FlashAttention4(), "fa4", [*DENSE, *MORE, *PACKED]),
    (flash_attn.FlashAttention3(), "fa3", [*DENSE, *MORE, *PACKED]),
    (flash_attn.FlashAttention2(), "fa2", [*DENSE, *MORE]),
    (flash_attn.FlashAttention2(), "fa2 varlen", PACKED),
]


@pytest.mark.parametrize(
    ("kernel", "called", "name"), [(kernel, called, name) for kernel, called, names in ADAPTERS for name in names]
)
def test_an_adapter_calls_its_vendor_as_documented(kernel: Kernel, called: str, name: str, calls: Calls) -> None:
    found = errors(kernel, (CASES | SQUARE)[name])
    assert max(found.values()) <= 1e-10, found
    assert calls == [f"{called} forward", f"{called} backward"]


@pytest.mark.parametrize("kernel", [aten_flash.AtenFlash(), fa4.FlashAttention4(), flash_attn.FlashAttention2()])
def test_borders_are_made_once_and_checked(kernel: Kernel, calls: Calls) -> None:
    case = CASES["packed"]
    case.block.cache.clear()
    errors(kernel, case)
    (kept,) = case.block.cache.values()
    errors(kernel, case)
    assert list(case.block.cache.values()) == [kept]
    x = torch.zeros(1, 5, 3, 8, dtype=torch.float64)
    with pytest.raises(KernelError, match="do not fit 5 queries"):
        kernel.forward(x, x, x, packed(True, (2, 2)), 1.0)
    with pytest.raises(KernelError, match="Segment 1 has 0 queries"):
        kernel.forward(x, x, x, packed(True, (5, 0)), 1.0)


@pytest.mark.parametrize("name", ["causal, more keys", "packed"])
def test_cudnn_does_only_what_every_version_agrees_on(name: str, calls: Calls) -> None:
    with pytest.raises(KernelError, match=r"Kernel 'cudnn' cannot do this call .*: it (does not take|is causal only)"):
        errors(cudnn.Cudnn(), CASES[name])
    assert calls == []


@pytest.mark.parametrize(
    ("dtype", "head_dim", "v_head_dim", "says"),
    [
        (torch.bfloat16, 128, 128, "nothing"),
        (torch.float16, 64, 64, "nothing"),
        (torch.float32, 64, 64, "bf16 and fp16, not float32"),
        (torch.bfloat16, 192, 128, "one head_dim, not 192 and 128"),
        (torch.bfloat16, 136, 136, "a multiple of 8 up to 128, not 136"),
        (torch.bfloat16, 20, 20, "a multiple of 8 up to 128, not 20"),
    ],
)
def test_operands_that_cuda_kernels_refuse(dtype: torch.dtype, head_dim: int, v_head_dim: int, says: str) -> None:
    found = cuda.operand_problem(Request(torch.device("cuda"), dtype, head_dim, v_head_dim), 128)
    assert says in (found or "nothing")


def test_devices_that_cuda_kernels_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    assert cuda.device_problem(torch.device("cpu")) == "it runs on CUDA devices, not on cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda.device_problem(device) == "this process sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert cuda.device_problem(device) is None
    assert cuda.device_problem(device, (9, 0)) == "it needs compute capability 9.0, this device has 8.6"


def test_a_package_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.import_problem("json", "json") is None
    with pytest.raises(KernelError, match=r"no_such_module of some-package cannot be imported \(ModuleNotFoundError"):
        cuda.load("no_such_module", "some-package")
    monkeypatch.setattr(cuda, "import_module", lambda name: (_ for _ in ()).throw(OSError("undefined symbol")))
    assert "OSError: undefined symbol" in str(cuda.import_problem("flash_attn_interface", "flash-attn-3"))

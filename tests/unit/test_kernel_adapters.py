"""The CUDA adapters on a CPU: stand-ins with the vendors' signatures compute by the reference and check each call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_cases import CAPPED, CASES, Case, packed, relative_error
from longspan.errors import KernelError
from longspan.kernels import aten_flash, cuda, cudnn, fa4, flash_attn
from longspan.kernels.guard import Guard
from longspan.kernels.protocol import Kernel, Request, Score
from longspan.kernels.reference import Reference
from longspan.mask import Block

REFERENCE = Reference()
DENSE = ["causal, grouped, 63 tokens", "full", "transposed square", "expanded gradient"]
MORE = ["causal, more keys", "full, more keys", "fused"]
PACKED = ["packed", "packed, more keys", "packed, full", "packed, fused"]
WINDOWS = ["window", "window of one", "window, more keys", "window, no order", "window, fused"]
PACKED_WINDOWS = ["window, packed", "window, packed, more keys", "window, packed, no order"]
SOFTCAPS = ["softcap, causal, grouped, 63 tokens", "softcap, full", "softcap, window", "softcap, window, no order"]
PACKED_SOFTCAPS = ["softcap, packed, more keys"]
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


@dataclass(frozen=True)
class Told:
    """What a vendor's call is told besides its operands, in the vendor's terms.

    Args:
        cu, longest: borders and longest segment of queries and keys.
        left, right: a window; None or -1 is no bound.
    """

    causal: bool
    scale: Any
    cu: tuple[Any, Any] = (None, None)
    longest: tuple[Any, Any] = (None, None)
    left: int | None = None
    right: int | None = None
    softcap: float | None = None

    def read(self, q: Tensor, k: Tensor) -> tuple[Block, Score]:
        """Check it, and return what it says in our terms."""
        score = Score(self.scale, self.softcap or None)
        left = None if self.left in (None, -1) else self.left
        if left is not None:
            assert self.right in ((0,) if self.causal else (None, -1))
        if self.cu[0] is None:
            assert self.cu[1] is None
            assert q.dim() == k.dim() == 4
            block = Block(self.causal, left=left)
            assert not block.diagonal or q.shape[1] <= k.shape[1]
            return block, score
        assert q.dim() == k.dim() == 3
        assert self.cu[0].dtype == self.cu[1].dtype == torch.int32
        assert all(type(x) is int for x in self.longest)
        assert self.longest == tuple(int(x.diff().max()) for x in self.cu)
        return Block(self.causal, tuple(self.cu[0].tolist()), tuple(self.cu[1].tolist()), left), score

    def row(self, x: Tensor) -> Tensor:
        return x if self.cu[0] is None else x[None]

    def rows(self, *found: Tensor) -> tuple[Tensor, ...]:
        return found if self.cu[0] is None else tuple(x[0] for x in found)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Compute a vendor's forward: [B, S, H, D] dense, [T, H, D] packed with lse [H, T]."""
        told = self.read(q, k)
        return self.rows(*REFERENCE.forward(self.row(q), self.row(k), self.row(v), *told))

    def backward(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Compute a vendor's backward from dout, q, k, v, out and lse."""
        _, q, k, _, _, lse = operands
        assert lse.is_contiguous()
        told = self.read(q, k)
        return self.rows(*REFERENCE.backward(*(self.row(x) for x in operands), *told))  # type: ignore[arg-type]


def aten_functions(seen: Calls) -> tuple[Any, ...]:
    empty = torch.empty(0)

    def _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
        *, scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, **later,
    ):  # fmt: skip
        seen.append("flash forward")
        assert (dropout_p, return_debug_mask) == (0.0, False)
        assert (seqused_k, alibi_slopes) == (None, None)
        if cum_seq_q is None:
            assert (max_q, max_k) == (query.shape[1], key.shape[1])
        cu, longest = (cum_seq_q, cum_seq_k), (max_q, max_k)
        told = Told(is_causal, scale, cu, longest, window_size_left, window_size_right)
        return *told.forward(query, key, value), empty, empty, empty

    def _flash_attention_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        seen.append("flash backward")
        assert dropout_p == 0.0
        assert rng_state.dtype == torch.uint64
        assert rng_state.shape == (2,)
        cu, longest = (cum_seq_q, cum_seq_k), (max_q, max_k)
        told = Told(is_causal, scale, cu, longest, window_size_left, window_size_right)
        return told.backward(grad_out, query, key, value, out, logsumexp)

    def _scaled_dot_product_cudnn_attention(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False,
        *, scale: Any = None,
    ):  # fmt: skip
        seen.append("cudnn forward")
        assert (attn_bias, compute_log_sumexp, dropout_p, return_debug_mask) == (None, True, 0.0, False)
        assert not is_causal or query.shape[2] == key.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, lse = REFERENCE.forward(q, k, v, Block(is_causal), Score(scale))
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
        grads = REFERENCE.backward(dout, q, k, v, out, logsumexp.squeeze(-1), Block(is_causal), Score(scale))
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
        causal=False, softcap=None, window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        seen.append("fa4 forward")
        assert return_lse is True
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        told = Told(causal, softmax_scale, cu, longest, window_size_left, window_size_right, softcap)
        return *told.forward(q, k, v), None, None, None

    def _flash_attn_bwd(
        *, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False,
    ):  # fmt: skip
        seen.append("fa4 backward")
        assert dout.is_contiguous()
        assert softcap is not None
        assert deterministic is True  # as the process asked for
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        told = Told(causal, softmax_scale, cu, longest, window_size_left, window_size_right, softcap)
        return *told.backward(dout, q, k, v, out, lse), None

    return _flash_attn_fwd, _flash_attn_bwd


def fa2_functions(seen: Calls) -> tuple[Any, ...]:
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        seen.append("fa2 forward")
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        told = Told(causal, softmax_scale, left=window_size_left, right=window_size_right, softcap=softcap)
        return *told.forward(q, k, v), None, None

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        seen.append("fa2 varlen forward")
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        told = Told(causal, softmax_scale, cu, longest, window_size_left, window_size_right, softcap)
        return *told.forward(q, k, v), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        seen.append("fa2 backward")
        assert (dropout_p, alibi_slopes, deterministic) == (0.0, None, True)
        told = Told(causal, softmax_scale, left=window_size_left, right=window_size_right, softcap=softcap)
        write((dq, dk, dv), told.backward(dout, q, k, v, out, softmax_lse))
        return softmax_lse

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        seen.append("fa2 varlen backward")
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        told = Told(causal, softmax_scale, cu, longest, window_size_left, window_size_right, softcap)
        write((dq, dk, dv), told.backward(dout, q, k, v, out, softmax_lse))
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
        told = Told(causal, softmax_scale, cu, longest, window_size_left, window_size_right, softcap)
        return *told.forward(q, k, v), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        seen.append("fa3 backward")
        assert deterministic is True
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        told = Told(is_causal, softmax_scale, cu, longest, window_size_left, window_size_right, softcap)
        write((dq, dk, dv), told.backward(dout, q, k, v, out, softmax_lse))
        return softmax_lse

    return _flash_attn_forward, _flash_attn_backward


def write(into: tuple[Any, ...], grads: tuple[Tensor, ...]) -> None:
    for x, grad in zip(into, grads, strict=True):
        x.copy_(grad)


def errors(kernel: Kernel, case: Case) -> dict[str, float]:
    q, k, v, dout = operands = case.operands()
    out, lse = kernel.forward(q, k, v, case.block, case.score)
    kept, kept_lse = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, lse))  # as a merge may leave them
    dq, dk, dv = kernel.backward(dout, q, k, v, kept, kept_lse, case.block, case.score)
    found, true = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, case.truth(operands)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in true.items()}
    return {name: relative_error(found[name], true[name]) for name in true}


EVERYTHING = [*DENSE, *MORE, *PACKED, *WINDOWS, *PACKED_WINDOWS, *SOFTCAPS, *PACKED_SOFTCAPS]
ADAPTERS: list[tuple[Kernel, str, list[str]]] = [
    (aten_flash.AtenFlash(), "flash", [*DENSE, *MORE, *PACKED, *WINDOWS, *PACKED_WINDOWS]),
    (cudnn.Cudnn(), "cudnn", [*DENSE, "full, more keys"]),
    (fa4.FlashAttention4(), "fa4", EVERYTHING),
    (flash_attn.FlashAttention3(), "fa3", EVERYTHING),
    (flash_attn.FlashAttention2(), "fa2", [*DENSE, *MORE, *WINDOWS, *SOFTCAPS]),
    (flash_attn.FlashAttention2(), "fa2 varlen", [*PACKED, *PACKED_WINDOWS, *PACKED_SOFTCAPS]),
]


@pytest.mark.parametrize(
    ("kernel", "called", "name"), [(kernel, called, name) for kernel, called, names in ADAPTERS for name in names]
)
def test_an_adapter_calls_its_vendor_as_documented(kernel: Kernel, called: str, name: str, calls: Calls) -> None:
    found = errors(kernel, (CASES | CAPPED | SQUARE)[name])
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
        kernel.forward(x, x, x, packed(True, (2, 2)), Score(1.0))
    with pytest.raises(KernelError, match="Segment 1 has 0 queries"):
        kernel.forward(x, x, x, packed(True, (5, 0)), Score(1.0))


def test_operands_of_a_type_that_is_refused_are_told_the_way_out(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is picked for bf16 where weights are wider, as autocast may come later; here it has not."""
    for module in (aten_flash, cudnn):
        monkeypatch.setattr(module, "operand_problem", cuda.operand_problem)
    way_out = r"not float32\. Run the model under bf16 autocast or with bf16 weights, or choose kernel 'reference'"
    case = CASES["causal, more keys"]
    with pytest.raises(KernelError, match=way_out):
        Guard(aten_flash.AtenFlash()).forward(*case.operands(torch.float32)[:3], case.block, case.score)
    with pytest.raises(KernelError, match=r"causal only with as many keys as queries\.$"):
        cudnn.Cudnn().forward(*case.operands(torch.bfloat16)[:3], case.block, case.score)
    assert calls == []


@pytest.mark.parametrize("name", ["causal, more keys", "packed", "window, no order", "softcap, full"])
def test_cudnn_does_only_what_every_version_agrees_on(name: str, calls: Calls) -> None:
    with pytest.raises(KernelError, match=r"Kernel 'cudnn' cannot do this call .*: it (does not|is causal only)"):
        errors(cudnn.Cudnn(), (CASES | CAPPED)[name])
    assert calls == []


def test_pytorchs_flash_attention_does_not_cap_scores(calls: Calls) -> None:
    with pytest.raises(KernelError, match=r"Kernel 'aten-flash' cannot do this call .*it does not cap scores"):
        errors(aten_flash.AtenFlash(), CAPPED["softcap, full"])
    assert calls == []


def test_fa4_caps_no_scores_of_head_dim_256_on_the_newest_devices(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(torch.device("cuda"), torch.bfloat16, 256, 256, softcap=True)
    assert "does not cap scores of head_dim 256" in (fa4.FlashAttention4().refuses(request) or "")
    assert fa4.FlashAttention4().refuses(replace(request, head_dim=128, v_head_dim=128)) is None
    monkeypatch.setattr(fa4, "device_problem", lambda device, oldest: "old" if oldest == (10, 0) else None)
    assert fa4.FlashAttention4().refuses(request) is None


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

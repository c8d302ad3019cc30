"""Attention kernels on a CPU against autograd through a masked softmax in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernel_cases import CAPPED, CASES, Case, packed, relative_error
from longspan.errors import KernelError
from longspan.kernels.compose import Either, EqualDims
from longspan.kernels.cpu import Cpu
from longspan.kernels.merge import merge_
from longspan.kernels.protocol import Kernel, Request, Score, asked, wide
from longspan.kernels.reference import Reference
from longspan.mask import Block

EXACT = 1e-10
KERNELS: dict[str, Kernel] = {
    "reference": Reference(),
    "cpu": EqualDims(Cpu()),
    "reference, equal dims": EqualDims(Reference()),
}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that a row nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(kernel: Kernel, case: Case, operands: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    q, k, v, dout = operands
    out, lse = kernel.forward(q, k, v, case.block, case.score)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, case.block, case.score)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def errors(kernel: Kernel, case: Case, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    operands = case.operands(dtype)
    true, found = case.truth(operands), run(kernel, case, operands)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in true.items()}
    return {name: relative_error(found[name], true[name]) for name in true}


def test_uninitialised_memory_is_poisoned() -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_and_gradients_are_exact(kernel: str, name: str) -> None:
    found = errors(KERNELS[kernel], CASES[name])
    assert max(found.values()) <= EXACT, found


@pytest.mark.parametrize("name", CAPPED)
@pytest.mark.parametrize("kernel", ["reference", "reference, equal dims"])
def test_capped_scores_are_exact(kernel: str, name: str) -> None:
    found = errors(KERNELS[kernel], CAPPED[name])
    assert max(found.values()) <= EXACT, found


def test_the_cpu_kernel_does_not_cap_scores() -> None:
    with pytest.raises(KernelError, match=r"Kernel 'cpu' cannot do this call .*it does not cap scores"):
        errors(Cpu(), CAPPED["softcap, full"])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_lower_precision_stays_near_its_rounding(kernel: str, dtype: torch.dtype, bound: float) -> None:
    for name in ("causal, grouped, 63 tokens", "causal, more keys", "packed, more keys", "narrow values"):
        case = CASES[name]
        operands = case.operands(dtype)
        found = run(KERNELS[kernel], case, operands)
        assert found["out"].dtype == dtype
        assert found["lse"].dtype == torch.float32
        assert all(found[name].dtype in (dtype, wide(dtype)) for name in ("dq", "dk", "dv"))
        worst = errors(KERNELS[kernel], case, dtype)
        assert max(worst.values()) <= bound, worst


def test_the_reference_is_as_exact_under_autocast() -> None:
    for name in ("causal, grouped, 63 tokens", "packed, more keys"):
        with torch.autocast("cpu", torch.bfloat16):
            for dtype, bound in ((torch.float64, EXACT), (torch.float32, 2e-6)):
                found = errors(Reference(), CASES[name], dtype)
                assert max(found.values()) <= bound, (name, dtype, found)


class Mutant:
    """A kernel with one defect, to show that the comparison sees it."""

    name = "mutant"

    def __init__(self, defect: str) -> None:
        self.inner, self.defect = Reference(), defect

    def refuses(self, request: Request) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        if self.defect == "scale doubled":
            score = replace(score, scale=2 * score.scale)
        if self.defect == "key heads interleaved":
            k = k.roll(1, dims=2)
        if self.defect == "causal from the top left":
            out, lse = self.inner.forward(q, k[:, : q.shape[1]], v[:, : q.shape[1]], block, score)
        else:
            out, lse = self.inner.forward(q, k, v, block, score)
        if self.defect == "heads swapped":
            out = out.flip(2)
        if self.defect == "row unwritten":
            out[:, -1] = torch.nan
        if self.defect == "lse zero":
            lse = torch.zeros_like(lse)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.defect == "delta without out":
            out = torch.zeros_like(out)
        grads = dict(zip(("dq", "dk", "dv"), self.inner.backward(dout, q, k, v, out, lse, block, score), strict=True))
        name, _, change = self.defect.partition(" ")
        if name in grads:
            grad = grads[name]
            grads[name] = {"zero": 0 * grad, "doubled": 2 * grad, "flipped": grad.flip(2)}[change]
        return grads["dq"], grads["dk"], grads["dv"]


@pytest.mark.parametrize(
    "defect",
    [f"{name} {change}" for name in ("dq", "dk", "dv") for change in ("zero", "doubled", "flipped")]
    + ["scale doubled", "key heads interleaved", "heads swapped", "row unwritten", "lse zero", "delta without out"]
    + ["causal from the top left"],
)
def test_a_defect_is_seen(defect: str) -> None:
    case = CASES["causal, more keys"]
    assert max(errors(Mutant("none"), case).values()) <= EXACT
    assert max(errors(Mutant(defect), case).values()) > 1e-2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("at", [1, 7, 8])
def test_two_key_blocks_with_the_final_lse_are_one_attention(kernel: str, at: int) -> None:
    case = Case(Block(True), 5, 13, rows=2)  # the first 8 keys are seen by all queries
    found = split(KERNELS[kernel], case, at, final=True)
    assert max(found.values()) <= EXACT, found


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_blocks_own_lse_is_seen_to_be_wrong(kernel: str) -> None:
    case = Case(Block(True), 5, 13, rows=2)
    found = split(KERNELS[kernel], case, 7, final=False)
    assert max(found["out"], found["lse"]) <= EXACT
    assert min(found["dq"], found["dk"], found["dv"]) > 1e-2


def split(kernel: Kernel, case: Case, at: int, *, final: bool) -> dict[str, float]:
    """Compare two key blocks, the first without a mask, with the whole."""
    q, k, v, dout = case.operands()
    true = case.truth((q, k, v, dout))
    blocks = [(slice(0, at), Block(False)), (slice(at, None), Block(True))]
    parts = [kernel.forward(q, k[:, keys], v[:, keys], block, case.score) for keys, block in blocks]
    out, lse = (x.clone() for x in parts[0])
    merge_(out, lse, *parts[1])
    grads = [
        kernel.backward(dout, q, k[:, keys], v[:, keys], *((out, lse) if final else part), block, case.score)
        for (keys, block), part in zip(blocks, parts, strict=True)
    ]
    dq = grads[0][0] + grads[1][0]
    dk, dv = (torch.cat((grads[0][i], grads[1][i]), 1) for i in (1, 2))
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {name: relative_error(found[name], true[name]) for name in true}


def test_merge_survives_scores_far_apart() -> None:
    out, lse = torch.ones(1, 2, 1, 3), torch.tensor([[[-2000.0, 900.0]]])
    merge_(out, lse, torch.full((1, 2, 1, 3), 5.0), torch.tensor([[[1000.0, -900.0]]]))
    assert out[0, :, 0, 0].tolist() == [5.0, 1.0]
    assert lse.tolist() == [[[1000.0, 900.0]]]


def test_one_of_two_kernels_is_chosen_by_the_call() -> None:
    class Dense(Cpu):
        name = "dense"
        calls = 0

        def refuses(self, request: Request) -> str | None:
            return "dense only" if request.varlen or request.bottom_right else None

        def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return super().forward(q, k, v, block, score)

    dense = Dense()
    either = Either(dense, Reference())
    assert either.name == "dense+reference"
    for name, calls in (("causal", 1), ("full", 2), ("causal, more keys", 2), ("packed", 2)):
        assert max(errors(either, CASES[name]).values()) <= EXACT
        assert dense.calls == calls
    request = Request(torch.device("cpu"), torch.float64, 8, 8, varlen=True)
    assert either.refuses(request) is None
    assert Either(dense, dense).refuses(request) == "dense only"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("block", "queries", "keys", "says"),
    [
        (Block(True), 3, 0, "at least one query and one key"),
        (Block(False), 0, 3, "at least one query and one key"),
        (Block(True), 4, 3, "no more queries than keys"),
        (packed(True, (3, 0)), 3, 3, "Segment 1 has 0 queries and 0 keys"),
        (packed(True, (3, 1), (3, 0)), 4, 3, "no more queries than keys|1 queries and 0 keys"),
        (packed(True, (2, 2), (1, 3)), 4, 4, "Segment 0 has 2 queries and 1 keys"),
        (packed(True, (3, 1)), 5, 5, "do not fit 5 queries and 5 keys"),
        (Block(True, (1, 4), (0, 4)), 4, 4, "do not fit"),
        (Block(False, left=2), 4, 3, "a window no more queries than keys"),
        (packed(False, (3, 1), (2, 2), left=2), 4, 4, "Segment 0 has 3 queries and 2 keys"),
    ],
)
def test_calls_without_meaning_are_refused(kernel: str, block: Block, queries: int, keys: int, says: str) -> None:
    q, kv = torch.zeros(1, queries, 6, 8), torch.zeros(1, keys, 3, 8)
    for call in (
        lambda: KERNELS[kernel].forward(q, kv, kv, block, Score(1.0)),
        lambda: KERNELS[kernel].backward(q, q, kv, kv, q, torch.zeros(1, 6, queries), block, Score(1.0)),
    ):
        with pytest.raises(KernelError, match=says):
            call()


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 4, 6, 8), (1, 4, 4, 8), (1, 4, 4, 8)),
        ((1, 4, 6, 8), (1, 4, 3, 4), (1, 4, 3, 8)),
        ((1, 4, 6, 8), (1, 4, 3, 8), (1, 5, 3, 8)),
        ((2, 4, 6, 8), (1, 4, 3, 8), (1, 4, 3, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    with pytest.raises(KernelError, match=r"K dividing H"):
        Cpu().forward(torch.zeros(q), torch.zeros(k), torch.zeros(v), Block(True), Score(1.0))


def test_packed_rows_are_one_at_a_time() -> None:
    x = torch.zeros(2, 4, 3, 8)
    with pytest.raises(KernelError, match="one row per call"):
        Cpu().forward(x, x, x, packed(True, (4,)), Score(1.0))


def test_a_call_is_described_as_a_request() -> None:
    q, k, v = torch.zeros(1, 3, 2, 8), torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2, 4)
    plain, score = Request(q.device, q.dtype, 8, 4), Score(1.0)
    assert asked(q, k, v, Block(False), score) == plain
    assert asked(q, k, v, Block(True), score) == replace(plain, bottom_right=True)
    assert asked(k, k, v, Block(True), score) == plain
    assert asked(q, k, v, packed(True, (1, 2), (2, 3)), score) == replace(plain, varlen=True, bottom_right=True)
    assert asked(k, k, v, packed(True, (2, 3)), score) == replace(plain, varlen=True)
    assert asked(q[:, :1], k, v, Block(False), score) == replace(plain, single=True)
    assert asked(q, k, v, Block(False, left=0), Score(1.0, 2.0)) == replace(plain, window=True, softcap=True)
    assert str(replace(plain, varlen=True)) == "float32, head_dim 8 (values 4), on cpu, packed documents"
    assert str(replace(plain, window=True, softcap=True)).endswith("on cpu, a window, a softcap")

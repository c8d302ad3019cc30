"""Every CUDA kernel that is usable here, in bf16, against the reference in fp64.

Errors are bounded by multiples of what rounding the true result to bf16 costs (about 1.6e-3 in relative L2): an output
may cost twice that, a gradient, which passes through rounded probabilities, four times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longspan.kernels.guard import INT32_ELEMENTS, Guard
from longspan.kernels.merge import merge_
from longspan.kernels.protocol import Kernel, Request, Score, asked
from longspan.kernels.reference import Reference
from longspan.kernels.select import available, pick
from longspan.mask import Block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
NAMES = ["auto", "sdpa", "aten-flash", "cudnn", "fa4", "fa3", "fa2"]
TOLERATED = {"out": 2.0, "dq": 4.0, "dk": 4.0, "dv": 4.0}
HEADS = {"32:8 x 128": (32, 8, 128), "32:8 x 64": (32, 8, 64), "6:3 x 128": (6, 3, 128), "4:4 x 256": (4, 4, 256)}

Operands = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """A call's block and tokens."""

    block: Block
    queries: int
    keys: int
    rows: int = 1


SHAPES = {
    "causal": Shape(Block(True), 257, 257, rows=2),
    "causal, one token": Shape(Block(True), 1, 1, rows=2),
    "bottom-right": Shape(Block(True), 65, 321, rows=2),
    "bottom-right, one query": Shape(Block(True), 1, 321),
    "full": Shape(Block(False), 130, 67, rows=2),
    "full, more keys": Shape(Block(False), 67, 259),
    "packed": Shape(Block(True, (0, 1, 38, 39, 239, 369), (0, 1, 38, 39, 239, 369)), 369, 369),
    "packed, bottom-right": Shape(Block(True, (0, 1, 38, 43), (0, 9, 46, 116)), 43, 116),
    "packed, full": Shape(Block(False, (0, 1, 38, 43), (0, 9, 20, 116)), 43, 116),
    "window": Shape(Block(True, left=100), 257, 257, rows=2),
    "window of one": Shape(Block(True, left=0), 257, 257),
    "window, bottom-right": Shape(Block(True, left=99), 65, 321, rows=2),
    "window, no order": Shape(Block(False, left=140), 130, 270, rows=2),
    "window, no order, square": Shape(Block(False, left=0), 130, 130),
    "window, packed": Shape(Block(True, (0, 1, 38, 39, 239, 369), (0, 1, 38, 39, 239, 369), 50), 369, 369),
    "window, packed, bottom-right": Shape(Block(True, (0, 1, 38, 43), (0, 9, 46, 116), 20), 43, 116),
}
CAPPED = Score(0.1, 4.0)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fill memory that kernels are about to get with NaN, without switching them to deterministic variants."""
    torch.cuda.empty_cache()
    torch.full((2**26,), torch.nan, device=DEVICE)
    yield
    torch.cuda.empty_cache()


def operands(shape: Shape, heads: tuple[int, int, int], v_head_dim: int | None = None) -> Operands:
    made = torch.Generator(DEVICE).manual_seed(0)
    count, kv_count, dim = heads

    def normal(tokens: int, count: int, dim: int) -> Tensor:
        size = (shape.rows, tokens, count, dim)
        return torch.randn(size, generator=made, device=DEVICE, dtype=torch.float32).to(torch.bfloat16)

    values = v_head_dim or dim
    return (
        normal(shape.queries, count, dim),
        normal(shape.keys, kv_count, dim),
        normal(shape.keys, kv_count, values),
        normal(shape.queries, count, values),
    )


def run(kernel: Kernel, given: Operands, block: Block, score: Score | None = None) -> dict[str, Tensor]:
    q, k, v, dout = given
    score = score or Score(q.shape[-1] ** -0.5)
    out, lse = kernel.forward(q, k, v, block, score)
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, block, score)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def truth(given: Operands, block: Block, score: Score | None = None) -> dict[str, Tensor]:
    q, k, v, dout = (x.double() for x in given)
    return run(Reference(), (q, k, v, dout), block, score)


def excess(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """Return each error beside the one that is tolerated; above 1 is wrong."""
    beside = {}
    for name, factor in TOLERATED.items():
        size = true[name].norm().clamp_min(3e-3 * true[name].numel() ** 0.5)
        rounding = 2.0**-9.3  # relative L2 error of rounding to bf16
        error = (found[name].double() - true[name]).norm() / size
        beside[name] = float((error / (factor * rounding)).nan_to_num(torch.inf))
    error = (found["lse"].double() - true["lse"]).abs().max()
    return beside | {"lse": float((error / 1e-3).nan_to_num(torch.inf))}


def kernel_for(name: str, given: Operands, block: Block, score: Score | None = None) -> Kernel:
    """Pick a kernel, or skip if it is not installed or does not do such calls."""
    if why := available(DEVICE).get(name):
        pytest.skip(f"{name}: {why}")
    q, k, v, _ = given
    request = asked(q, k, v, block, score or Score(1.0))
    never = request.varlen or request.bottom_right or request.single or request.window or request.softcap
    if name == "cudnn" and (never or request.head_dim > 128):
        pytest.skip("cudnn does not do such calls")
    if request.softcap and name in ("sdpa", "aten-flash"):
        pytest.skip(f"{name} does not cap scores")
    return pick(name, request)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients(name: str, heads: str, shape: str) -> None:
    block, given = SHAPES[shape].block, operands(SHAPES[shape], HEADS[heads])
    kernel = kernel_for(name, given, block)
    found = run(kernel, given, block)
    assert found["out"].dtype == torch.bfloat16
    assert found["lse"].dtype == torch.float32
    beside = excess(found, truth(given, block))
    assert max(beside.values()) <= 1, (kernel.name, beside)


@pytest.mark.parametrize("shape", ["causal", "full", "packed, bottom-right", "window", "window, no order"])
@pytest.mark.parametrize("heads", ["32:8 x 128", "4:4 x 256"])
@pytest.mark.parametrize("name", ["fa4", "fa3", "fa2"])
def test_capped_scores(name: str, heads: str, shape: str) -> None:
    """The cap is so tight that it changes the result by far more than rounding does."""
    block, given = SHAPES[shape].block, operands(SHAPES[shape], HEADS[heads])
    kernel = kernel_for(name, given, block, CAPPED)
    found, true = run(kernel, given, block, CAPPED), truth(given, block, CAPPED)
    assert max(excess(found, true).values()) <= 1, (kernel.name, excess(found, true))
    assert max(excess(run(kernel, given, block, Score(CAPPED.scale)), true).values()) > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_window_that_is_off_by_one_is_seen(name: str) -> None:
    block, given = SHAPES["window"].block, operands(SHAPES["window"], HEADS["32:8 x 128"])
    kernel = kernel_for(name, given, block)
    assert max(excess(run(kernel, given, Block(True, left=101)), truth(given, block)).values()) > 1


@pytest.mark.parametrize("shape", ["causal", "bottom-right", "packed", "window, bottom-right"])
@pytest.mark.parametrize("name", NAMES)
def test_views_and_broadcast_gradients(name: str, shape: str) -> None:
    block, (q, k, v, dout) = SHAPES[shape].block, operands(SHAPES[shape], HEADS["32:8 x 128"])
    kernel = kernel_for(name, (q, k, v, dout), block)
    fused = torch.cat((k, v), 2)  # k and v as slices of one projection
    strided = (
        q.transpose(1, 2).contiguous().transpose(1, 2),
        fused[:, :, :8],
        fused[:, :, 8:],
        dout[..., :1].expand_as(dout),
    )
    beside = excess(run(kernel, strided, block), truth(strided, block))
    assert max(beside.values()) <= 1, (kernel.name, beside)


@pytest.mark.parametrize("shape", ["causal", "packed, bottom-right"])
@pytest.mark.parametrize("name", NAMES)
def test_values_of_another_head_dim(name: str, shape: str) -> None:
    block, given = SHAPES[shape].block, operands(SHAPES[shape], (8, 8, 192), v_head_dim=128)
    kernel = kernel_for(name, given, block)
    beside = excess(run(kernel, given, block), truth(given, block))
    assert max(beside.values()) <= 1, (kernel.name, beside)


@pytest.mark.parametrize("name", NAMES)
def test_two_key_blocks_with_the_final_lse(name: str) -> None:
    shape = Shape(Block(True), 129, 400)
    q, k, v, dout = given = operands(shape, HEADS["32:8 x 128"])
    score, ahead = Score(q.shape[-1] ** -0.5), shape.keys - shape.queries
    kernel = kernel_for(name, (q, k[:, ahead:], v[:, ahead:], dout), Block(True))
    blocks = [(slice(0, ahead), Block(False)), (slice(ahead, None), Block(True))]
    parts = [kernel.forward(q, k[:, at], v[:, at], block, score) for at, block in blocks]
    merged, lse = parts[0][0].float(), parts[0][1].clone()
    merge_(merged, lse, *parts[1])
    out = merged.to(q.dtype)

    def gradients(own: bool) -> dict[str, Tensor]:
        grads = [
            kernel.backward(dout, q, k[:, at], v[:, at], *(part if own else (out, lse)), block, score)
            for (at, block), part in zip(blocks, parts, strict=True)
        ]
        dk, dv = (torch.cat((grads[0][i], grads[1][i]), 1) for i in (1, 2))
        return {"out": out, "lse": lse, "dq": grads[0][0].float() + grads[1][0].float(), "dk": dk, "dv": dv}

    true = truth(given, shape.block)
    assert max(excess(gradients(own=False), true).values()) <= 1
    wrong = excess(gradients(own=True), true)
    assert min(wrong["dq"], wrong["dk"], wrong["dv"]) > 1


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("defect", ["zero", "scaled by 1.02", "heads rolled", "last token unwritten"])
def test_a_defect_is_seen(name: str, defect: str) -> None:
    shape = SHAPES["causal"]
    given = operands(shape, HEADS["6:3 x 128"])
    true = truth(given, shape.block)
    found = run(pick("auto", asked(*given[:3], shape.block, Score(1.0))), given, shape.block)
    assert max(excess(found, true).values()) <= 1
    x = found[name].clone()
    if defect == "zero":
        x.zero_()
    elif defect == "scaled by 1.02":
        x *= 1.02
    elif defect == "heads rolled":
        x = x.roll(1, dims=1 if name == "lse" else 2)
    else:
        x[..., -1:] = torch.nan
    assert excess(found | {name: x}, true)[name] > 1


@pytest.mark.parametrize("split", ["rows", "head groups", "heads", "tokens"])
@pytest.mark.parametrize("shape", ["causal", "bottom-right", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_the_guard_splits_exactly(name: str, shape: str, split: str) -> None:
    asked_for = SHAPES[shape]
    given = operands(asked_for, HEADS["32:8 x 64"])
    kernel = kernel_for(name, given, asked_for.block)
    assert isinstance(kernel, Guard)
    longest = max(asked_for.queries, asked_for.keys)
    tokens = {"rows": 32 * longest, "head groups": 9 * longest, "heads": 3 * longest, "tokens": 100}[split]
    beside = excess(run(Guard(kernel.inner, tokens * 64 + 1), given, asked_for.block), truth(given, asked_for.block))
    assert max(beside.values()) <= 1, (kernel.name, beside)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_just_above_the_32_bit_index(name: str) -> None:
    """Queries of 2.15e9 elements; short documents, so the attention itself is cheap. Needs about 40 GiB."""
    length, heads = 1021, HEADS["32:8 x 128"]
    count = INT32_ELEMENTS // (length * heads[0] * heads[2]) + 1
    cu = tuple(range(0, (count + 1) * length, length))
    shape = Shape(Block(True, cu, cu), cu[-1], cu[-1])
    given = operands(shape, heads)
    assert INT32_ELEMENTS < given[0].numel() < 1.01 * INT32_ELEMENTS
    kernel = kernel_for(name, given, shape.block)
    found = run(kernel, given, shape.block)
    for document in (0, count // 2, count - 1):
        at = slice(cu[document], cu[document + 1])
        true = truth(tuple(x[:, at] for x in given), Block(True))  # type: ignore[arg-type]
        mine = {n: x[:, :, at] if n == "lse" else x[:, at] for n, x in found.items()}
        beside = excess(mine, true)
        assert max(beside.values()) <= 1, (kernel.name, document, beside)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_keys_just_above_the_32_bit_index_once_per_query_head(name: str) -> None:
    """Few queries against 525 thousand keys: below the limit as they are, above it as backward expands them."""
    heads = HEADS["32:8 x 128"]
    shape = Shape(Block(True), 33, INT32_ELEMENTS // (heads[0] * heads[2]) + 65)
    given = operands(shape, heads)
    kernel = kernel_for(name, given, shape.block)
    found = run(kernel, given, shape.block)
    q, k, v, dout = given
    true = truth((q[:, :, -4:], k[:, :, -1:], v[:, :, -1:], dout[:, :, -4:]), shape.block)
    mine = {n: x[:, -4:] if n == "lse" else x[:, :, -4 if n in ("out", "dq") else -1 :] for n, x in found.items()}
    # gradients of this many keys are tiny, so they are compared at their own size
    for n in ("out", "dq", "dk", "dv"):
        scale = true[n].norm() / true[n].numel() ** 0.5
        true[n], mine[n] = true[n] / scale, mine[n].double() / scale
    beside = excess(mine, true)
    assert max(beside.values()) <= 1, (kernel.name, beside)


def test_the_request_of_a_model_gets_one_kernel() -> None:
    request = Request(DEVICE, torch.bfloat16, 128, 128, varlen=True, bottom_right=True)
    expected = "fa4" if available(DEVICE)["fa4"] is None else "cudnn+aten-flash"
    assert pick("auto", request).name == expected
    assert pick("sdpa", request).name == "cudnn+aten-flash"

"""The guard against 32-bit indices, with limits small enough for a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_cases import CASES, Case, relative_error
from longspan.errors import KernelError
from longspan.kernels.cpu import Cpu
from longspan.kernels.guard import INT32_ELEMENTS, Guard, cut, extent
from longspan.kernels.protocol import Request, Score
from longspan.kernels.reference import Reference
from longspan.mask import Block

WIDTH = 32  # head_dim 8 as kernels round it up


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Watched(Reference):
    """A kernel that notes each call and checks how far its operands reach."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.shapes: list[tuple[int, ...]] = []
        self.blocks: list[Block] = []

    def refuses(self, request: Request) -> str | None:
        return "the guard must not need more keys than queries" if request.bottom_right and not request.varlen else None

    def see(self, block: Block, *operands: Tensor) -> None:
        for x in operands:
            assert extent(x) < self.limit
        expanded = operands[1].shape[1] * operands[0].shape[2] * operands[0].shape[0] * WIDTH
        assert expanded < self.limit
        self.shapes.append((*operands[0].shape[:3], *operands[1].shape[1:3]))
        self.blocks.append(block)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        self.see(block, q, k, v)
        return super().forward(q, k, v, block, score)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.see(block, q, k, v, dout, out, lse)
        return super().backward(dout, q, k, v, out, lse, block, score)


class Lenient(Watched):
    def refuses(self, request: Request) -> str | None:
        return None


def guarded(case: Case, inner: Reference | Cpu, limit: int) -> dict[str, float]:
    q, k, v, dout = operands = case.operands()
    guard = Guard(inner, limit)
    out, lse = guard.forward(q, k, v, case.block, case.score)
    dq, dk, dv = guard.backward(dout, q, k, v, out, lse, case.block, case.score)
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    true = case.truth(operands)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in true.items()}
    return {name: relative_error(found[name], true[name]) for name in true}


# (budget in tokens of one head, q and k of the calls: rows, Sq, heads, Sk, key heads)
SPLITS = {
    "nothing": (13 * 6 * 3, {(3, 13, 6, 13, 3)}),
    "rows": (13 * 6 * 2, {(2, 13, 6, 13, 3), (1, 13, 6, 13, 3)}),
    "each row": (13 * 6, {(1, 13, 6, 13, 3)}),
    "two head groups": (13 * 5, {(1, 13, 4, 13, 2), (1, 13, 2, 13, 1)}),
    "each head group": (13 * 2, {(1, 13, 2, 13, 1)}),
    "each head": (13, {(1, 13, 1, 13, 1)}),
    "tokens": (5, {(1, 5, 1, 5, 1), (1, 3, 1, 5, 1), (1, 3, 1, 3, 1)}),
    "each token": (1, {(1, 1, 1, 1, 1)}),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("causal", [True, False])
def test_splits_are_exact_and_as_coarse_as_the_limit_allows(split: str, causal: bool) -> None:
    budget, shapes = SPLITS[split]
    limit = budget * WIDTH + 1
    watched = Watched(limit)
    found = guarded(Case(Block(causal), 13, 13, rows=3), watched, limit)
    assert max(found.values()) <= 1e-10, found
    assert set(watched.shapes) == shapes | ({(1, 5, 1, 3, 1)} if split == "tokens" and not causal else set())


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 12, 13, 24, 40, 100])
@pytest.mark.parametrize(
    "name",
    ["causal, more keys", "full", "full, more keys", "narrow values", "broad values", "fused", "causal, one query"],
)
def test_every_shape_is_exact_at_every_limit(name: str, budget: int) -> None:
    case = CASES[name]
    for inner in (Lenient(budget * WIDTH + 1), Cpu()):
        if isinstance(inner, Cpu):
            case = replace(case, v_head_dim=case.head_dim)
        found = guarded(case, inner, budget * WIDTH + 1)
        assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize("name", ["packed", "packed, more keys", "packed, full"])
@pytest.mark.parametrize("heads", [1, 2, 4, 6])
def test_packed_calls_are_split_over_heads_with_one_block(name: str, heads: int) -> None:
    case = CASES[name]
    limit = heads * max(case.queries, case.keys) * WIDTH + 1
    watched = Lenient(limit)
    found = guarded(case, watched, limit)
    assert max(found.values()) <= 1e-10, found
    assert {shape[2] for shape in watched.shapes} <= {heads, 2}
    assert all(block is case.block for block in watched.blocks)  # so the borders are moved to the device once


def test_gradients_are_wide_only_where_tiles_add_up() -> None:
    class Narrow(Reference):
        def backward(
            self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
        ) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = super().backward(dout, q, k, v, out, lse, block, score)
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    q, k, v, dout = Case(Block(True), 13, 13, rows=3).operands(torch.bfloat16)
    bf16, fp32 = torch.bfloat16, torch.float32
    expected = {
        "rows": (bf16, bf16),
        "each head group": (bf16, bf16),
        "each head": (bf16, fp32),
        "tokens": (fp32, fp32),
    }
    for split, dtypes in expected.items():
        guard = Guard(Narrow(), SPLITS[split][0] * WIDTH + 1)
        out, lse = guard.forward(q, k, v, Block(True), Score(0.3))
        dq, dk, dv = guard.backward(dout, q, k, v, out, lse, Block(True), Score(0.3))
        assert (out.dtype, lse.dtype, dq.dtype, dk.dtype, dv.dtype) == (bf16, fp32, *dtypes, dtypes[1])


def test_one_head_of_a_packed_call_must_fit() -> None:
    case = CASES["packed"]
    with pytest.raises(KernelError, match=r"20 tokens x head_dim 8, more than the 640 elements.*packed documents"):
        guarded(case, Reference(), 20 * WIDTH)
    with pytest.raises(KernelError, match=r"more than the 32 elements a kernel can index\. Use a higher"):
        guarded(CASES["causal"], Reference(), WIDTH)


def test_a_small_view_of_a_large_tensor_is_copied() -> None:
    limit = 13 * 6 * WIDTH + 1
    case = Case(Block(True), 13, 13)
    far = torch.zeros(1, 13, 60, 8, dtype=torch.float64)
    q, k, v, dout = case.operands()
    far[:, :, ::10] = q
    view = far[:, :, ::10]
    assert extent(view) > limit
    watched = Watched(limit)
    guard = Guard(watched, limit)
    out, lse = guard.forward(view, k, v, case.block, case.score)
    guard.backward(dout, view, k, v, out, lse, case.block, case.score)
    assert relative_error(out, case.truth((q, k, v, dout))["out"]) <= 1e-10
    assert len(watched.shapes) == 2


def test_below_the_limit_the_kernel_gets_the_operands_themselves() -> None:
    class Same(Reference):
        name = "same"

        def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
            self.got = (q, k, v, block)
            return super().forward(q, k, v, block, score)

    case, same = CASES["transposed"], Same()
    q, k, v, _ = case.operands()
    guard = Guard(same)
    assert (guard.name, guard.limit) == ("same", INT32_ELEMENTS)
    guard.forward(q, k, v, case.block, Score(1.0))
    assert [a is b for a, b in zip(same.got, (q, k, v, case.block), strict=True)] == [True] * 4


@pytest.mark.parametrize("lost", ["dk of a shared head", "a tile"])
def test_a_defect_is_seen(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.kernels import guard

    def fewer(*args: object) -> tuple[guard.Tile, ...]:
        tiles = cut(*args)  # type: ignore[arg-type]
        if lost == "a tile":
            return tiles[:-1]
        return (*tiles[:-1], replace(tiles[-1], heads=tiles[0].heads))

    monkeypatch.setattr(guard, "cut", fewer)
    assert max(guarded(Case(Block(True), 13, 13), Reference(), 13 * WIDTH + 1).values()) > 1e-2


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 9),
    more=st.integers(0, 6),
    causal=st.booleans(),
    budget=st.integers(1, 120),
)
def test_tiles_cover_every_visible_pair_once(
    rows: int, kv_heads: int, group: int, queries: int, more: int, causal: bool, budget: int
) -> None:
    heads, keys = kv_heads * group, queries + more
    limit = budget * WIDTH + 1
    seen = torch.zeros(rows, heads, queries, keys, dtype=torch.int)
    tiles = cut(torch.Size((rows, queries, heads, 8)), torch.Size((rows, keys, kv_heads, 8)), 8, Block(causal), limit)
    for tile in tiles:
        mine = range(heads)[tile.heads]
        assert {head // group for head in mine} == set(range(kv_heads)[tile.kv_heads])
        assert len(mine) % len(range(kv_heads)[tile.kv_heads]) == 0
        for at, masked in tile.keys:
            length_q, length_k = len(range(queries)[tile.q]), len(range(keys)[at])
            size = len(range(rows)[tile.rows]) * len(mine) * max(length_q, length_k) * WIDTH
            assert size < limit
            pairs = torch.ones(length_q, length_k, dtype=torch.int)
            seen[tile.rows, tile.heads, tile.q, at] += pairs.tril(length_k - length_q) if masked else pairs
    visible = torch.ones(queries, keys, dtype=torch.int)
    assert (seen == (visible.tril(more) if causal else visible)).all()


def test_larger_head_dims_are_rounded_up_as_kernels_do() -> None:
    def pieces(head_dim: int, limit: int) -> int:
        return len(cut(torch.Size((1, 10, 2, head_dim)), torch.Size((1, 10, 2, head_dim)), 8, Block(True), limit))

    assert pieces(80, 10 * 2 * 96 + 1) == 1
    assert pieces(80, 10 * 2 * 96) == 2
    assert pieces(160, 10 * 2 * 192) == 2

"""The gated delta rule, its convolution and its exchange, against transformers' own and against themselves, in fp64."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from longspan.check.float64 import float64_throughout
from longspan.comm.regroup import Regroup
from longspan.errors import KernelError
from longspan.layout import Layout, Piece
from longspan.mask import Mask
from longspan.mesh import Axis
from longspan.recurrent import conv
from longspan.recurrent.conv import causal_conv
from longspan.recurrent.fla import FlaRule
from longspan.recurrent.rule import ChunkedRule, Operands, ReferenceRule, Rule
from longspan.recurrent.select import divided, pick_rule
from longspan.recurrent.stretch import Stretch

CPU = torch.device("cpu")
HEADS, SHARE, DK, DV = 2, 2, 5, 3
LENGTHS = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=4), min_size=1, max_size=2)


def operands(rows: int, tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Operands:
    """Draw operands with slow decay, so that what leaks is seen far away."""
    make = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=make, dtype=torch.float64)

    values = HEADS * SHARE
    g, beta = -0.05 * draw(values).abs(), draw(values).sigmoid()
    q, k, v = (t.to(dtype) for t in (draw(HEADS, DK), draw(HEADS, DK), draw(values, DV)))
    return Operands(q, k, v, g, beta)


def listed(o: Operands) -> list[Tensor]:
    return [o.q, o.k, o.v, o.g, o.beta]


def packed(documents: Sequence[Sequence[int]]) -> tuple[Mask, int]:
    """Return the mask of rows of these documents, the last of each filled up, and their length."""
    tokens = max(sum(row) for row in documents)
    starts = tuple(tuple(sum(row[:i]) for i in range(len(row))) for row in documents)
    return Mask(tokens, starts), tokens


def stretch(mask: Mask, start: int, stop: int, halo: int = 0) -> Stretch:
    assert mask.documents is not None
    return Stretch.of(mask, len(mask.documents), Piece(start, stop), halo, CPU)


def results(rule: Rule, o: Operands, at: Stretch, state: Tensor | None) -> list[Tensor]:
    """Return outputs, transition and the gradients of all operands."""
    given = [t.clone().requires_grad_() for t in (*listed(o), *([] if state is None else [state]))]
    leaves = Operands(*given[:5])
    found = [rule.outputs(leaves, at, given[5] if state is not None else None), rule.transition(leaves, at)]
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(i)).to(t) for i, t in enumerate(found)]
    grads = torch.autograd.grad(found, given, weights, allow_unused=True)
    return [*found, *(torch.zeros_like(t) if d is None else d for t, d in zip(given, grads, strict=True))]


@given(LENGTHS)
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("rule", [ReferenceRule(), ChunkedRule()], ids=lambda rule: rule.name)
def test_outputs_equal_transformers_on_each_document_alone(rule: Rule, documents: list[list[int]]) -> None:
    mask, tokens = packed(documents)
    o, at = operands(len(documents), tokens), stretch(mask, 0, tokens)
    out = rule.outputs(o, at, None)
    q, k = (t.repeat_interleave(SHARE, 2) for t in (o.q, o.k))
    assert mask.documents is not None
    for row, starts in enumerate(mask.documents):
        for first, last in zip(starts, (*starts[1:], tokens), strict=True):
            part = [t[row : row + 1, first:last] for t in (q, k, o.v, o.g, o.beta)]
            with float64_throughout():
                alone: Any = theirs.torch_chunk_gated_delta_rule(
                    *part[:3], g=part[3], beta=part[4], use_qk_l2norm_in_kernel=True
                )
            assert torch.allclose(out[row, first:last], alone[0][0], atol=1e-12, rtol=0)


@given(LENGTHS, st.data())
@settings(max_examples=12, deadline=None)
def test_chunks_equal_tokens_one_by_one(documents: list[list[int]], data: st.DataObject) -> None:
    mask, tokens = packed(documents)
    start = data.draw(st.integers(0, tokens - 1))
    at = stretch(mask, start, data.draw(st.integers(start + 1, tokens)))
    o = operands(len(documents), len(at.piece))
    state = torch.randn(len(documents), HEADS * SHARE, DK, DV, dtype=torch.float64)
    for a, b in zip(results(ChunkedRule(), o, at, state), results(ReferenceRule(), o, at, state), strict=True):
        assert torch.allclose(a, b, atol=1e-11, rtol=1e-11)


@given(LENGTHS, st.data())
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize("rule", [ReferenceRule(), ChunkedRule()], ids=lambda rule: rule.name)
def test_stretches_with_passed_states_equal_the_whole(
    rule: Rule, documents: list[list[int]], data: st.DataObject
) -> None:
    mask, tokens = packed(documents)
    o = operands(len(documents), tokens)
    cuts = sorted({0, tokens, *data.draw(st.lists(st.integers(0, tokens), max_size=3))})
    state, outs = torch.zeros(len(documents), HEADS * SHARE, DK, DV, dtype=torch.float64), []
    for a, b in zip(cuts, cuts[1:], strict=False):
        part, at = Operands(*(t[:, a:b] for t in listed(o))), stretch(mask, a, b)
        outs.append(rule.outputs(part, at, state))
        left, through = rule.transition(part, at).split([DV, DK], -1)
        state = through @ state + left
    whole = rule.outputs(o, stretch(mask, 0, tokens), None)
    assert torch.allclose(torch.cat(outs, 1), whole, atol=1e-12, rtol=0)


def test_states_are_wide_whatever_the_operands() -> None:
    mask, tokens = packed([[400]])
    rounded, at = operands(1, tokens, torch.bfloat16), stretch(mask, 0, tokens)
    exact = ChunkedRule().outputs(Operands(*(t.double() for t in listed(rounded))), at, None)
    out = ChunkedRule().outputs(rounded, at, None)
    assert out.dtype == torch.bfloat16
    assert ChunkedRule().transition(rounded, at).dtype == torch.float32
    assert float((out - exact).abs().max()) < 2**-8 * float(exact.abs().max()), "one rounding, at the end"


@given(LENGTHS, st.integers(0, 3), st.data())
@settings(max_examples=20, deadline=None)
def test_convolution_equals_each_document_alone(documents: list[list[int]], halo: int, data: st.DataObject) -> None:
    mask, tokens = packed(documents)
    start = data.draw(st.integers(0, tokens - 1))
    at = stretch(mask, start, tokens, halo)
    make = torch.Generator().manual_seed(1)
    x = torch.randn(len(documents), tokens, 4, generator=make, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 4, generator=make, dtype=torch.float64, requires_grad=True)
    given = x[:, start - at.halo :]
    with patch.object(conv, "_BLOCK_TOKENS", 17):
        out = causal_conv(given, weight, at.numbers, at.halo)
        assert mask.documents is not None
        rows = []
        for row, starts in enumerate(mask.documents):
            cut = sorted({start - at.halo, *(s for s in starts if s > start - at.halo)})
            parts = [x[row : row + 1, a:b].mT for a, b in zip(cut, [*cut[1:], tokens], strict=True)]
            alone = [F.conv1d(F.pad(part, (3, 0)), weight[:, None], groups=4).mT for part in parts]
            rows.append(torch.cat(alone, 1)[:, at.halo :])
        true = torch.cat(rows)
        assert torch.allclose(out, true, atol=1e-13, rtol=0)
        dout = torch.randn(true.shape, generator=make, dtype=torch.float64)
        pairs = zip(*(torch.autograd.grad(y, (x, weight), dout) for y in (out, true)), strict=True)
        assert all(torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in pairs)


class _Sent(Exception):
    """Ends an exchange once a rank has said what it sends."""


def exchange(regroups: Sequence[Regroup], run: Callable[[int], Tensor]) -> list[Tensor]:
    """Run an exchange on every rank of an axis, in this process."""
    sent: list[Sequence[Tensor]] = []

    def record(self: Regroup, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        sent.append(parts)
        raise _Sent

    def deliver(self: Regroup, parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        found = [parts[self.axis.rank] for parts in sent]
        assert [part.numel() for part in found] == list(sizes)
        return torch.cat(found)

    with patch.object(Regroup, "_exchange", record):
        for rank in range(len(regroups)):
            with pytest.raises(_Sent):
                run(rank)
    with patch.object(Regroup, "_exchange", deliver):
        return [run(rank) for rank in range(len(regroups))]


@given(
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_each_rank_gets_its_stretch_and_the_way_back_is_the_transpose(
    tokens: int, ring: int, ulysses: int, tile: int | None, heads: int, rows: int
) -> None:
    layout, size = Layout(tokens, ring, ulysses, tile), ring * ulysses
    if size == 1:
        return
    regroups = [Regroup(layout, Axis(size, rank, tuple(range(size))), heads, 3) for rank in range(size)]
    full = torch.randn(rows, layout.length, heads, 2, dtype=torch.float64)
    shards = [full[:, layout.indices(rank)] for rank in range(size)]
    for halo in (False, True):
        given = exchange(regroups, lambda rank, halo=halo: regroups[rank].to_stretch(shards[rank], halo))
        back = [torch.randn_like(t) for t in given]
        for regroup, t in zip(regroups, given, strict=True):
            piece, run = regroup.piece(regroup.stretch), regroup.run(regroup.axis.rank)
            assert torch.equal(t, full[:, max(0, piece.start - 3 * halo) : piece.stop, run.start : run.stop])
        returned = exchange(regroups, lambda rank, halo=halo, back=back: regroups[rank].to_shard(back[rank], halo))
        one = sum(float((a * b).sum()) for a, b in zip(given, back, strict=True))
        other = sum(float((a * b).sum()) for a, b in zip(shards, returned, strict=True))
        assert one == pytest.approx(other, abs=1e-9)
    covered = sorted((r.stretch, head) for r in regroups for head in r.run(r.axis.rank))
    assert covered == [(s, head) for s in range(regroups[0].stretches) for head in range(heads)]


def test_a_plan_says_how_recurrences_are_divided() -> None:
    assert divided(16, 8) == "recurrent layers: 16 key heads over 8 ranks"
    assert (
        divided(16, 32) == "recurrent layers: 16 key heads over 16 ranks, states passed on between 2 stretches of a row"
    )
    assert divided(2, 3).startswith("recurrent layers: 2 key heads over 1 rank, states passed on between 3 stretches")


def fake_rule(**given: Any) -> tuple[Tensor, Tensor | None]:
    """Stand in for `chunk_gated_delta_rule`: one row, a segment and a state per document."""
    named = {"initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"}
    assert given.keys() == {"q", "k", "v", "g", "beta", *named}
    assert given["use_qk_l2norm_in_kernel"] and given["q"].shape[0] == 1
    assert given["q"].dtype == given["k"].dtype == given["v"].dtype == torch.bfloat16
    borders, first = given["cu_seqlens"].tolist(), given["initial_state"]
    outs, states = [], []
    for number, (a, b) in enumerate(zip(borders, borders[1:], strict=False)):
        part = Operands(*(given[name][:, a:b] for name in ("q", "k", "v", "g", "beta")))
        at = replace(stretch(Mask(b - a, ((0,),)), 0, b - a), continued=(True,))
        state = None if first is None else first[number : number + 1]
        out, left = ReferenceRule()._walk(part, at, state)
        outs.append(out)
        states.append(left)
    return torch.cat(outs, 1), torch.cat(states) if given["output_final_state"] else None


class Written(TorchDispatchMode):
    """Counts the numbers that operators return."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        return out


def test_the_work_on_chunks_is_linear_in_their_number() -> None:
    counts = []
    for tokens in (16 * 64, 32 * 64):
        o = operands(1, tokens)
        with Written() as written:
            results(ChunkedRule(), o, stretch(packed([[tokens]])[0], 0, tokens), None)
        counts.append(written.count)
    assert counts[1] < 2.1 * counts[0]


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = fake_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("cut", [(0, 60), (7, 50), (20, 41)])
def test_flash_linear_attention_is_called_with_a_segment_per_document(cut: tuple[int, int]) -> None:
    mask, _ = packed([[20, 1, 39], [60]])
    at = stretch(mask, *cut)
    o = operands(2, len(at.piece), torch.bfloat16)
    state = torch.randn(2, HEADS * SHARE, DK, DV, generator=torch.Generator().manual_seed(4))
    for first in (None, state):
        pairs = zip(results(FlaRule(), o, at, first), results(ChunkedRule(), o, at, first), strict=True)
        for a, b in pairs:
            assert a.dtype == b.dtype
            assert float((a - b).detach().abs().max()) <= 2**-6 * float(b.detach().abs().max())


@pytest.mark.usefixtures("fla")
def test_flash_linear_attention_refuses_what_it_does_not_compute() -> None:
    mask, tokens = packed([[9]])
    with pytest.raises(KernelError, match=r"bf16 and fp16 .* not in float32 with 5\. Train under bf16 autocast"):
        FlaRule().outputs(operands(1, tokens, torch.float32), stretch(mask, 0, tokens), None)
    with (
        patch("longspan.recurrent.fla.device_problem", lambda device: None),
        patch.object(metadata, "version", lambda name: "0.5.1"),
    ):
        assert FlaRule.missing(CPU) == "it needs flash-linear-attention 0.5.2, 0.5.1 is installed"


@pytest.mark.usefixtures("fla")
def test_the_rule_is_chosen_by_name_and_said() -> None:
    assert pick_rule("cpu", CPU)[1] == "gated delta rule in PyTorch"
    assert pick_rule("reference", CPU)[0].name == "reference"
    with patch("longspan.recurrent.fla.device_problem", lambda device: None):
        with patch.object(metadata, "version", lambda name: "0.5.2"):
            assert pick_rule("fa4", CPU)[0].name == "fla"
        cuda = torch.device("cuda")
        with patch.object(metadata, "version", lambda name: "0.4.2"):
            rule, note = pick_rule("fa4", cuda)
    assert rule.name == "torch"
    assert note == "gated delta rule in PyTorch, slowly: it needs flash-linear-attention 0.5.2, 0.4.2 is installed"


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize(
    ("major", "triton", "tilelang", "wrong"),
    [
        (9, "3.6.0", None, True),
        (9, "3.4.0", (False, True), True),
        (9, "3.7.0+git1", (True, False), True),
        (9, "3.6.0", (True, True), False),
        (9, "3.3.1", None, False),
        (9, "3.7.1", None, False),
        (9, "3.10.0", None, False),
        (8, "3.6.0", None, False),
        (10, "3.6.0", None, False),
    ],
)
def test_a_backward_that_the_library_refuses_is_found_before_the_first_one(
    monkeypatch: pytest.MonkeyPatch, major: int, triton: str, tilelang: tuple[bool, bool] | None, wrong: bool
) -> None:
    """TileLang is available and enabled or not, or the library knows nothing of it."""
    compiler, backends = ModuleType("triton"), ModuleType("fla.ops.common.backends.tilelang")
    compiler.__dict__["__version__"] = triton
    if tilelang is not None:
        answers = {"is_available": lambda self: tilelang[0], "is_enabled": lambda self: tilelang[1]}
        backends.__dict__["TileLangBackend"] = type("TileLangBackend", (), answers)
    for module in (compiler, backends):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr("longspan.recurrent.fla.device_problem", lambda device: None)
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.0")
    rule, note = pick_rule("fa4", torch.device("cuda"))
    assert rule.name == ("torch" if wrong else "fla")
    assert note == (
        f"gated delta rule in PyTorch, slowly: Triton {triton} compiles the backward of flash-linear-attention wrongly "
        "for this GPU (Hopper); it needs Triton 3.7.1 or later, or tilelang and nvcc"
        if wrong
        else "gated delta rule of flash-linear-attention"
    )

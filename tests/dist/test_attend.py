"""Sequence-parallel attention against dense attention: outputs and gradients in fp64, for every way to divide it.

The same check must go red for each mistake that was seen in practice: see `MISTAKES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dense import TOLERANCE, Starts, attention, relative
from longspan import Layout, Mask, attend
from longspan.attention import gather as gather_module
from longspan.attention import ulysses as ulysses_module
from longspan.attention.gather import _Walk
from longspan.attention.gathering import Gathering, Indices
from longspan.attention.ring import Ring
from longspan.attention.schedule import Schedule
from longspan.attention.ulysses import Ulysses
from longspan.comm.ring import Packet
from longspan.comm.rows import exchange_rows
from longspan.mesh import Mesh, build_mesh, data_parallel_ranks
from longspan.plan.degrees import Degrees
from longspan.segments import segment_layout
from pool import RunRanks

pytestmark = pytest.mark.dist

DEGREES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)]
HEADS = [(4, 2), (6, 3), (5, 1), (5, 5)]


@dataclass(frozen=True)
class Case:
    """One call: `starts` as in `dense`, dims of one head."""

    heads: int
    kv_heads: int
    tokens: int
    starts: Starts | None = None
    rows: int = 1
    head_dim: int = 4
    v_head_dim: int = 4
    kernel: str = "reference"
    zigzag: bool = True
    tile: int | None = None
    exchange: Literal["ring", "gather"] = "ring"
    segments: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def layout(self, ring: int, ulysses: int) -> Layout:
        if self.segments:
            return segment_layout(self.tokens, self.starts[0] if self.starts else (0,), ring, ulysses)
        return Layout(self.tokens, ring, ulysses, self.tile, self.zigzag)


def cases(heads: int, kv_heads: int, kernel: str) -> list[Case]:
    """List lengths and documents: odd ones, one-token documents, one across all ranks, ranks with padding alone."""
    base = Case(heads, kv_heads, 63, kernel=kernel)
    across = ((0, 1, 2, 62),)
    return [
        base,
        replace(base, tokens=1),
        replace(base, tokens=2, rows=2),
        replace(base, tokens=64, zigzag=False),
        replace(base, tokens=7, starts=(tuple(range(7)),)),
        replace(base, starts=across),
        replace(base, starts=((0, 5, 6, 20, 47),), zigzag=False),
        replace(base, rows=2, starts=((0, 33), tuple(range(0, 63, 2)))),
        replace(base, tile=3, starts=((0, 30),)),
        replace(base, tile=100, rows=2),
        replace(base, tokens=17, head_dim=3, v_head_dim=5),
        replace(base, tokens=18, head_dim=6, v_head_dim=2, starts=((0, 9),)),
        *restricted(base),
    ]


def restricted(base: Case) -> list[Case]:
    """List windows, from the token alone to all but the first, softcaps, sinks, and all of them at once."""
    some = [
        replace(base, window=1),
        replace(base, window=9, starts=((0, 1, 2, 62),)),
        replace(base, window=30, rows=2),
        replace(base, window=62),
        replace(base, window=20, starts=((0, 5, 6, 20, 47),), zigzag=False),
        replace(base, window=7, rows=2, starts=((0, 33), tuple(range(0, 63, 2)))),
        replace(base, window=5, tile=3, starts=((0, 30),)),
        replace(base, sinks=True, rows=2),
        replace(base, sinks=True, starts=((0, 1, 2, 62),)),
    ]
    return some + [replace(case, softcap=0.8, sinks=True) for case in some[:6] if base.kernel != "cpu"]


def errors(case: Case, mesh: Mesh) -> dict[str, float]:
    """Return the relative errors of this rank's out, dq, dk and dv."""
    scale = 0.7 * case.head_dim**-0.5
    layout = case.layout(mesh.ring.size, mesh.ulysses.size)
    shapes = [(case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim)]
    options: dict[str, Any] = {"softcap": case.softcap}
    make = torch.Generator().manual_seed(case.tokens)
    full = [torch.randn(case.rows, case.tokens, *s, generator=make, dtype=torch.float64) for s in shapes]
    dout = torch.randn(case.rows, case.tokens, case.heads, case.v_head_dim, generator=make, dtype=torch.float64)

    true = tq, tk, tv = [t.clone().requires_grad_() for t in full]
    drawn = torch.randn(case.heads, generator=make, dtype=torch.float64)
    ts, sinks = (drawn.clone().requires_grad_() if case.sinks else None for _ in range(2))
    out = attention(tq, tk, tv, case.starts, scale, window=case.window, sinks=ts, **options)
    out.backward(dout)

    at = [i for i in layout.indices(mesh.sequence.rank) if i < case.tokens]
    pad = layout.shard_tokens - len(at)

    def mine(t: Tensor, fill: float) -> Tensor:
        return torch.cat([t[:, at], t.new_full((t.shape[0], pad, *t.shape[2:]), fill)], 1)

    local = q, k, v = [mine(t, 50.0).requires_grad_() for t in full]  # a leak of padding would show
    starts = None if case.starts is None else tuple(tuple(row) for row in case.starts)
    options |= {"scale": scale}
    mask = Mask(layout.length, starts, case.window)
    schedule = Schedule.of(mask, layout, mesh.ring.rank, case.exchange, case.rows)
    found = attend(q, k, v, mask, mesh, schedule=schedule, kernel=case.kernel, sinks=sinks, **options)
    found.backward(mine(dout, 0.0))
    pairs: dict[str, Any] = {"out": (found.detach(), out.detach())}
    grads: list[Any] = [t.grad for t in local]
    pairs |= {f"d{n}": (grad, t.grad) for n, grad, t in zip("qkv", grads, true, strict=True)}
    result = {name: relative(a[:, : len(at)], b[:, at], b) for name, (a, b) in pairs.items()}
    if sinks is not None and ts is not None:
        share: Any = torch.zeros_like(sinks) if sinks.grad is None else sinks.grad.clone()
        dist.all_reduce(share, group=mesh.sequence.group)
        result["dsinks"] = relative(share, ts.grad)  # type: ignore[arg-type]
    result["padding"] = max(float((grad[:, len(at) :] != 0).sum()) for grad in grads)
    return result


def run_cases(ulysses: int, ring: int, wanted: list[Case], mistake: str | None = None) -> list[dict[str, float]]:
    mesh = build_mesh(data_parallel_ranks(ulysses * ring, None), Degrees(ulysses, ring, ""), "cpu")
    with MISTAKES[mistake](mesh) if mistake else nullcontext():
        return [errors(case, mesh) for case in wanted]


def wrong(results: list[list[dict[str, float]]], wanted: list[Case]) -> list[tuple[Case, int, dict[str, float]]]:
    """Return what is not exact: case, rank, errors."""
    return [
        (case, rank, found[i])
        for rank, found in enumerate(results)
        for i, case in enumerate(wanted)
        if not all(error <= TOLERANCE for error in found[i].values())
    ]


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize(("ulysses", "ring"), DEGREES, ids=str)
def test_attention_is_exact(run_ranks: RunRanks, ulysses: int, ring: int, kernel: str) -> None:
    wanted = [case for h, k in HEADS if ulysses <= h for case in cases(h, k, kernel)]
    assert not wrong(run_ranks(ulysses * ring, run_cases, ulysses, ring, wanted), wanted)


GATHERED = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (2, 1)]


def gathered(heads: int, kv_heads: int, kernel: str) -> list[Case]:
    """List cases whose keys are gathered: every layout that a ring serves, and segments of documents."""
    base = Case(heads, kv_heads, 181, kernel=kernel, exchange="gather", segments=True)
    odd = (0, 1, 2, 9, 40, 105, 134, 135)
    return [
        *(replace(case, exchange="gather") for case in cases(heads, kv_heads, kernel)),
        base,
        replace(base, starts=(odd,)),
        replace(base, starts=((*odd, *range(141, 181)),)),  # forty documents of one token
        replace(base, tokens=53, starts=((0, 50, 52),)),  # across every rank
        replace(base, tokens=1),
        replace(base, tokens=24, starts=(tuple(range(0, 24, 2)),)),  # nobody needs anything
        replace(base, tokens=130, starts=((0, 100),), head_dim=3, v_head_dim=5),
        replace(base, starts=(odd,), window=20, sinks=True),
        replace(base, window=40),
        replace(base, window=1),
        replace(base, starts=(odd,), exchange="ring"),
    ]


LONG = Case(2, 1, 1203, ((0, 700, 701, 703, 840),), exchange="gather", segments=True)


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize(("ulysses", "ring"), GATHERED, ids=str)
def test_attention_with_gathered_keys_is_exact(run_ranks: RunRanks, ulysses: int, ring: int, kernel: str) -> None:
    wanted = [case for h, k in HEADS[1:3] if ulysses <= h for case in gathered(h, k, kernel)]
    wanted.append(replace(LONG, kernel=kernel))
    assert not wrong(run_ranks(ulysses * ring, run_cases, ulysses, ring, wanted), wanted)


def packings(ring: int) -> list[int]:
    """Count how often a forward and backward copies tensors into a packet."""
    mesh = build_mesh(data_parallel_ranks(ring, None), Degrees(1, ring, ""), "cpu")
    with patch.object(Packet, "of", side_effect=Packet.of) as packed:
        found = errors(Case(4, 2, 63), mesh)
    return [packed.call_count, sum(error > TOLERANCE for error in found.values())]


def test_keys_and_gradients_are_packed_once_and_travel_as_they_are(run_ranks: RunRanks) -> None:
    assert run_ranks(4, packings, 4) == [[3, 0]] * 4, "k and v in either direction, dk and dv"


def block_lse(replaced: str) -> Callable[[Mesh], Any]:
    """Give a block's backward its own log-sum-exp or output in place of the final one."""

    @contextmanager
    def mistake(mesh: Mesh) -> Iterator[None]:
        right = Ring.backward

        def backward(self: Ring, dout: Tensor, saved: Any, schedule: Any, score: Any) -> Any:
            return right(Ring(_BlockFinal(self.kernel, replaced), self.axis), dout, saved, schedule, score)  # type: ignore[arg-type]

        with patch.object(Ring, "backward", backward):
            yield

    return mistake


class _BlockFinal:
    def __init__(self, inner: Any, replaced: str) -> None:
        self.inner, self.replaced, self.name = inner, replaced, inner.name

    def refuses(self, request: Any) -> None:
        return None

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Any:
        own, own_lse = self.inner.forward(q, k, v, *rest)
        out, lse = (own, lse) if self.replaced == "out" else (out, own_lse)
        return self.inner.backward(dout, q, k, v, out, lse, *rest)


def gradients(change: Callable[[list[Tensor], Mesh], None]) -> Callable[[Mesh], Any]:
    """Change what Ulysses hands back as dq, dk and dv."""

    @contextmanager
    def mistake(mesh: Mesh) -> Iterator[None]:
        right = Ulysses.leave_gradients

        def leave_gradients(self: Ulysses, *grads: Tensor) -> Any:
            def changed(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                found = [g.clone() for g in parts]
                change(found, mesh)
                return tuple(found)

            return right(self, *grads).then(changed)  # type: ignore[arg-type]

        with patch.object(Ulysses, "leave_gradients", leave_gradients):
            yield

    return mistake


def zero(which: int) -> Callable[[list[Tensor], Mesh], None]:
    def change(grads: list[Tensor], mesh: Mesh) -> None:
        grads[which].zero_()

    return change


def times_sp(grads: list[Tensor], mesh: Mesh) -> None:
    for g in grads:
        g *= mesh.sequence.size


def swap_heads(which: int) -> Callable[[list[Tensor], Mesh], None]:
    def change(grads: list[Tensor], mesh: Mesh) -> None:
        grads[which] = grads[which].roll(1, 2)

    return change


def round_to_float(grads: list[Tensor], mesh: Mesh) -> None:
    grads[1] = grads[1].float().double()


@contextmanager
def lost_replicas(mesh: Mesh) -> Iterator[None]:
    """Keep one replica's gradient of a KV head instead of the sum."""

    def first(dkv: Tensor, heads: list[int], count: int) -> Tensor:
        return torch.stack([dkv[:, :, heads.index(head)] for head in range(count)], 2)

    with patch.object(ulysses_module, "_gather_heads", first):
        yield


@contextmanager
def whole_row_mask(mesh: Mesh) -> Iterator[None]:
    """Forget the borders between documents."""
    with patch.object(Mask, "packed", False):
        yield


def gathering(name: str, value: Callable[[Indices], Any]) -> Callable[[Mesh], Any]:
    """Change an index of the exchange that gathers keys."""

    @contextmanager
    def mistake(mesh: Mesh) -> Iterator[None]:
        right = Gathering.on

        def on(self: Gathering, device: torch.device) -> Indices:
            at = right(self, device)
            return replace(at, **{name: value(at)})

        with patch.object(Gathering, "on", on):
            yield

    return mistake


@contextmanager
def gradients_stay(mesh: Mesh) -> Iterator[None]:
    """Lose the gradients of keys that other ranks needed."""
    right = _Walk.send_back

    def send_back(self: _Walk, *grads: Tensor) -> Any:
        with patch.object(gather_module, "exchange_rows", lambda *args: exchange_rows(*args).then(torch.zeros_like)):
            return right(self, *grads)

    with patch.object(_Walk, "send_back", send_back):
        yield


MISTAKES: dict[str, Callable[[Mesh], Any]] = {
    "block-lse": block_lse("lse"),
    "block-out": block_lse("out"),
    "zero-dq": gradients(zero(0)),
    "zero-dk": gradients(zero(1)),
    "zero-dv": gradients(zero(2)),
    "times-sp": gradients(times_sp),
    "swapped-q-heads": gradients(swap_heads(0)),
    "swapped-kv-heads": gradients(swap_heads(1)),
    "fp32-dk": gradients(round_to_float),
    "lost-replicas": lost_replicas,
    "no-borders": whole_row_mask,
    "gather: gradients stay": gradients_stay,
    "gather: fp32-dk": gradients(round_to_float),
    "gather: a later segment's keys are not laid out": gathering("filled", lambda at: at.filled[:1]),
    "gather: keys in another order": gathering("own", lambda at: at.own.flip(0)),
    "gather: gradients at the wrong tokens": gathering("shared", lambda at: at.shared.flip(0)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_goes_red_for(run_ranks: RunRanks, mistake: str) -> None:
    ulysses, ring = (4, 1) if mistake == "lost-replicas" else (1, 2) if mistake.startswith("block") else (2, 2)
    wanted = [Case(4, 2, 63, ((0, 20),))]
    if mistake.startswith("gather"):
        ulysses, ring = 1, 3
        wanted = [Case(4, 2, 63, ((0, 1),), exchange="gather", segments=True)]
    assert not wrong(run_ranks(ulysses * ring, run_cases, ulysses, ring, wanted), wanted)
    found = wrong(run_ranks(ulysses * ring, run_cases, ulysses, ring, wanted, mistake), wanted)
    assert len(found) == ulysses * ring, "every rank's own check must see it"

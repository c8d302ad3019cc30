"""What dividing costs attention: heads exchanged, or packed rows divided by documents and keys gathered.

Each way is first compared with the definition. Attention over all processes is held against the same kernel on one
process's share of the heads while the others rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import NormalDist
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.build import Attend
from longspan.attention.schedule import Schedule
from longspan.bench.clock import Deadline, largest, median, rounds_ms
from longspan.bench.exchange import STANDARD_TOKENS, Exchanging, Heads, closed, dtype, normal, proven, ways
from longspan.bench.results import DONE, Results, Target
from longspan.kernels.protocol import Kernel, Request, Score
from longspan.kernels.select import pick
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Mesh, build_mesh, data_parallel_ranks
from longspan.needs import Needs
from longspan.once import tell
from longspan.plan.degrees import Degrees
from longspan.plan.exchange import ExchangeRule
from longspan.segments import pairs, segment_layout

LONG_DOCUMENTS = (40_000, 3000, 22_000, 517, 30_000, 12_000, 13_555)
"""Tokens of a row's documents where some take a large part of it."""

_COUNT, _STEP, _MEDIAN = 72, 29, 1100
_CLOSE = 2e-2


@dataclass(frozen=True)
class Row:
    """What is attended: a row of one document, or of several that start at `starts`."""

    name: str
    tokens: int
    starts: tuple[int, ...] | None = None
    figure: str | None = None


@dataclass(frozen=True)
class Way:
    """How attention is divided: over the heads, or with `gathers` over the segments of documents."""

    mesh: Mesh
    gathers: bool = False

    def schedule(self, row: Row) -> Schedule:
        """Return this rank's calls on a row."""
        size = self.mesh.sequence.size
        if self.gathers:
            layout = segment_layout(row.tokens, row.starts or (0,), size)
        else:
            layout = Layout(row.tokens, 1, size)
        mask = Mask(layout.length, None if row.starts is None else (row.starts,))
        return Schedule.of(mask, layout, self.mesh.ring.rank, "gather" if self.gathers else "ring")

    def decision(self, row: Row, heads: Heads) -> dict[str, Any]:
        """Return what a plan makes of a row that is divided by documents; nothing for another way."""
        if not self.gathers:
            return {}
        schedule = self.schedule(row)
        needs = Needs.of(schedule.mask, schedule.layout)
        work = [sum(pairs(r.start - r.first, r.stop - r.first) for r in runs) for runs in needs.runs]
        decision = ExchangeRule(kv_heads=heads.key).decide(needs, schedule.layout.ring)
        return {"exchange": str(decision), "imbalance": round(max(work) * len(work) / sum(work), 4)}


def measure_attention(asked: Exchanging, target: Target, deadline: Deadline, device: torch.device) -> Any:
    """Time attention's forward and backward over all processes, dense and packed; every rank calls it."""
    results = Results.open(target, "attention", asked, device)
    heads = asked.heads
    exchanged = {name: Way(mesh) for name, mesh in ways(asked, results, device).items()}
    by_documents = Way(build_mesh(data_parallel_ranks(asked.sp, None), Degrees(1, asked.sp, ""), device.type), True)
    kernel = pick(asked.kernel, Request(device, dtype(device), heads.dim, heads.dim, varlen=True, bottom_right=True))
    results.content["kernel"] = kernel.name
    standard = asked.tokens == STANDARD_TOKENS and heads == Heads()
    for row in rows_of(asked.tokens):
        # First all of them work, so that the one alone is as warm, and clocked as low, as all of them will be.
        attention_ms(next(iter(exchanged.values())), kernel, row, heads, asked.times)
        alone = 0.0
        if dist.get_rank() == 0:
            own = Heads(heads.query // asked.sp, max(1, heads.key // asked.sp), heads.dim)
            alone = attention_ms(Way(Mesh(device_type=device.type)), kernel, row, own, asked.times)
        alone = _meet(alone)
        for name, way in (exchanged | ({} if row.starts is None else {"gather": by_documents})).items():
            if not proven(results, f"{name} {row.name}", partial(wrong_attention, way, kernel, row, heads, device)):
                continue
            if not deadline.allows(2e-3 * alone * asked.times, device):
                return closed(results)
            found = results.begin({"name": row.name, "way": name, "kernel_alone_ms": round(alone, 4)})
            ms = largest(attention_ms(way, kernel, row, heads, asked.times), device)
            found |= {"median_ms": round(ms, 4), "share": round(alone / ms, 4), "state": DONE}
            found |= way.decision(row, heads)
            found |= {"figure": row.figure, "value": found["share"]} if standard and row.figure else {}
            results.save()
            tell(f"ATTENTION {found}")
    return closed(results)


def rows_of(tokens: int) -> tuple[Row, ...]:
    """Return the rows that are measured."""
    return (
        Row("dense", tokens, None, "P6"),
        Row("packed", tokens, document_starts(tokens, short_documents()), "P6_packed"),
        Row("packed, long documents", tokens, document_starts(tokens, LONG_DOCUMENTS)),
    )


def short_documents() -> list[int]:
    """Return documents like those of instruction data, in a fixed order: log-normal, median 1,100 tokens, sigma 1."""
    spread = NormalDist()
    found = [_MEDIAN * math.exp(spread.inv_cdf((i + 0.5) / _COUNT)) for i in range(_COUNT)]
    return [round(found[i * _STEP % _COUNT]) for i in range(_COUNT)]


def document_starts(tokens: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return where documents start in a row of so many tokens, with these lengths in proportion."""
    total = sum(lengths)
    scaled = [max(1, length * tokens // total) for length in lengths]
    return tuple(start for start in accumulate(scaled[:-1], initial=0) if start < tokens)


def attention_ms(way: Way, kernel: Kernel, row: Row, heads: Heads, times: int) -> float:
    """Return the median milliseconds of forward and backward on this rank's part of a row."""
    device = torch.device(way.mesh.device_type)
    attend, schedule = Attend(way.mesh, kernel), way.schedule(row)
    q, k, v = (
        normal(1, schedule.layout.shard_tokens, n, heads.dim, seed=i, device=device).requires_grad_()
        for i, n in enumerate((heads.query, heads.key, heads.key))
    )
    dout = normal(1, schedule.layout.shard_tokens, heads.query, heads.dim, seed=3, device=device)

    def work() -> None:
        torch.autograd.grad(attend(q, k, v, schedule, Score(heads.dim**-0.5)), (q, k, v), dout)

    return median(rounds_ms(work, times, 2, device))


def wrong_attention(way: Way, kernel: Kernel, row: Row, heads: Heads, device: torch.device) -> list[str]:
    """Compare attention on a short row like this one with its definition; list what differs.

    Where keys are gathered, a row of one document is compared too: short documents may need no keys of other ranks.
    """
    names = {row.name, "dense"} if way.gathers else {row.name}
    short = [other for other in rows_of(512 * way.mesh.sequence.size) if other.name in names]
    return [f"{row.name}: {what}" for row in short for what in _differences(way, kernel, row, heads, device)]


def _differences(way: Way, kernel: Kernel, short: Row, heads: Heads, device: torch.device) -> list[str]:
    """Compare attention over all ranks with attention in float32 on this one."""
    schedule = way.schedule(short)
    whole = [
        normal(1, short.tokens, n, heads.dim, seed=i, device=device)
        for i, n in enumerate((heads.query, heads.key, heads.key, heads.query))
    ]
    wide = [t.float().requires_grad_() for t in whole[:3]]
    out = _plain(wide[0], wide[1], wide[2], short, heads.dim**-0.5)
    expected = [out, *torch.autograd.grad(out, wide, whole[3].float())]
    at = torch.tensor(schedule.layout.indices(way.mesh.sequence.rank), device=device)
    q, k, v = (t[:, at].contiguous().requires_grad_() for t in whole[:3])
    mine = Attend(way.mesh, kernel)(q, k, v, schedule, Score(heads.dim**-0.5))
    found = [mine, *torch.autograd.grad(mine, (q, k, v), whole[3][:, at].contiguous())]
    errors = [
        float((got.detach().float() - want.detach()[:, at]).norm() / want.detach()[:, at].norm())
        for got, want in zip(found, expected, strict=True)
    ]
    named = zip(("out", "dq", "dk", "dv"), errors, strict=True)
    return [f"{what} is off by {error:.1e}" for what, error in named if not error < _CLOSE]


def _plain(q: Tensor, k: Tensor, v: Tensor, row: Row, scale: float) -> Tensor:
    """Attend from [1, S, H, D] to [1, S, K, D] by definition."""
    places = torch.arange(row.tokens, device=q.device)
    document = torch.bucketize(places, torch.tensor(row.starts or (0,), device=q.device), right=True)
    sees = (places[:, None] >= places) & (document[:, None] == document)
    share = q.shape[2] // k.shape[2]
    keys, values = (t.repeat_interleave(share, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * scale
    weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, values)


def _meet(value: float) -> float:
    """Return rank 0's value on all ranks, which wait for it on their hosts: a GPU that has nothing to do rests."""
    held = [value]
    group: Any = dist.new_group(backend="gloo")
    dist.broadcast_object_list(held, src=0, group=group)
    return held[0]

"""Milliseconds of the exchange of heads, and what exchanges cost attention.

Every way of exchanging is first compared with the definition, bit for bit. Attention over all processes is held against
the same kernel on one process's heads while the others rest.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.build import Attend
from longspan.attention.schedule import Schedule
from longspan.bench.clock import Deadline, largest, median, rounds_ms, timed
from longspan.bench.gate import first_failure
from longspan.bench.measure import tell
from longspan.bench.results import DONE, Results, Target
from longspan.comm.exchange import to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.comm.symmetric import with_copy_engine
from longspan.kernels.protocol import Kernel, Request, Score
from longspan.kernels.select import pick
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Axis, Mesh, build_mesh, data_parallel_ranks
from longspan.plan.degrees import Degrees

STANDARD_BYTES, STANDARD_TOKENS = 512 << 20, 131_072
DOCUMENTS = (40_000, 3000, 22_000, 517, 30_000, 12_000, 8555)
"""Tokens of the packed row's documents of 131,072, all but the last, which takes the rest."""

_FIGURES = {"q to heads, borrowed": "P7", "q to heads": "P7_ordinary"}
"""Results that are borrowed serve until the third exchange after; ordinary ones belong to the caller."""

_CLOSE = 2e-2
_WARM_UP = 10


@dataclass(frozen=True)
class Heads:
    """The attention that is exchanged for."""

    query: int = 32
    key: int = 8
    dim: int = 128


@dataclass(frozen=True)
class Exchanging:
    """What to measure.

    Args:
        payload_bytes: of an exchange, per process.
        tokens: of attention's row.
        kernel: of attention.
        times: how often.
    """

    sp: int
    heads: Heads = Heads()
    payload_bytes: int = STANDARD_BYTES
    tokens: int = STANDARD_TOKENS
    kernel: str = "auto"
    times: int = 100


def measure_exchange(asked: Exchanging, target: Target, deadline: Deadline, device: torch.device) -> Any:
    """Time exchanges to heads and back, by collectives and, where they work, by copy engines; every rank calls it."""
    results = Results.open(target, "exchange", asdict(asked), device)
    for way, mesh in _ways(asked, results, device).items():
        axis, heads = mesh.ulysses, asked.heads
        split = HeadSplit(heads.query, heads.key, axis.size)
        for name, counts, ranges in (
            ("q", (heads.query,), [split.query]),
            ("q, k, v", (heads.query, heads.key, heads.key), [split.query, split.key, split.key]),
        ):
            if not _proven(results, f"{way} {name}", partial(unequal, axis, heads, device)):
                continue
            tokens = asked.payload_bytes // (sum(counts) * heads.dim * 2)
            held = [_normal(1, tokens, n, heads.dim, device=device) for n in counts]
            joined = to_heads(held, ranges, axis).wait()
            works = {
                f"{direction}{', borrowed' * borrow}": partial(exchange, tensors, ranges, axis, borrow=borrow)
                for direction, exchange, tensors in (("to heads", to_heads, held), ("to tokens", to_tokens, joined))
                for borrow in ((False, True) if axis.copier else (False,))
            }
            for direction, work in works.items():
                seconds, _ = timed(lambda work=work: work().wait(), device)
                if not deadline.allows(seconds * (asked.times + _WARM_UP), device):
                    return _closed(results)
                row = results.begin({"name": f"{name} {direction}", "way": way})
                spread = rounds_ms(lambda work=work: work().wait(), asked.times, _WARM_UP, device)
                row |= {"median_ms": round(largest(median(spread), device), 4)}
                row |= {"p90_ms": round(largest(sorted(spread)[len(spread) * 9 // 10], device), 4), "state": DONE}
                standard = asked.payload_bytes == STANDARD_BYTES and heads == Heads()
                if standard and row["name"] in _FIGURES:
                    row |= {"figure": _FIGURES[row["name"]], "value": row["median_ms"]}
                results.save()
                tell(f"EXCHANGE {row}")
    return _closed(results)


def measure_attention(asked: Exchanging, target: Target, deadline: Deadline, device: torch.device) -> Any:
    """Time attention's forward and backward over all processes, dense and packed; every rank calls it."""
    results = Results.open(target, "attention", asdict(asked), device)
    meshes, heads = _ways(asked, results, device), asked.heads
    dtype = _dtype(device)
    kernel = pick(asked.kernel, Request(device, dtype, heads.dim, heads.dim, varlen=True))
    results.content["kernel"] = kernel.name
    standard = asked.tokens == STANDARD_TOKENS and heads == Heads()
    for name, mask, figure in (
        ("dense", Mask(asked.tokens), "P6"),
        ("packed", Mask(asked.tokens, (document_starts(asked.tokens),)), "P6_packed"),
    ):
        alone = 0.0
        # First all of them work, so that the one alone is as warm, and clocked as low, as all of them will be.
        attention_ms(next(iter(meshes.values())), kernel, mask, heads, asked.times)
        if dist.get_rank() == 0:
            own = Heads(heads.query // asked.sp, max(1, heads.key // asked.sp), heads.dim)
            alone = attention_ms(Mesh(device_type=device.type), kernel, mask, own, asked.times)
        alone = _meet(alone)
        for way, mesh in meshes.items():
            if not _proven(results, f"{way} {name}", partial(_wrong_attention, mesh, kernel, name, heads, device)):
                continue
            if not deadline.allows(2e-3 * alone * asked.times, device):
                return _closed(results)
            row = results.begin({"name": name, "way": way, "kernel_alone_ms": round(alone, 4)})
            ms = largest(attention_ms(mesh, kernel, mask, heads, asked.times), device)
            row |= {"median_ms": round(ms, 4), "share": round(alone / ms, 4), "state": DONE}
            row |= {"figure": figure, "value": row["share"]} if standard else {}
            results.save()
            tell(f"ATTENTION {row}")
    return _closed(results)


def document_starts(tokens: int) -> tuple[int, ...]:
    """Return where the documents of a packed row start, in the proportions of the standard one."""
    lengths = [max(1, length * tokens // STANDARD_TOKENS) for length in DOCUMENTS]
    return tuple(start for start in accumulate(lengths, initial=0) if start < tokens)


def unequal(axis: Axis, heads: Heads, device: torch.device) -> list[str]:
    """Compare exchanges of what every rank can make for itself with the definition; list what differs."""
    found = []
    for query, key, tokens, tile in ((heads.query, heads.key, 4097, None), (7, 7, 1001, 256), (9, 3, 4096, 1024)):
        split, layout = HeadSplit(query, key, axis.size), Layout(tokens * axis.size, 1, axis.size, tile)
        ranges = [split.query, split.key, split.key]
        whole = [
            _normal(1, layout.length, n, heads.dim, seed=i, device=device) for i, n in enumerate((query, key, key))
        ]
        at = torch.tensor(layout.indices(axis.rank), device=device)
        held = [t[:, at].transpose(1, 2).contiguous().transpose(1, 2) for t in whole]
        for borrow in (False, True):
            joined = to_heads(held, ranges, axis, layout.tiles(), borrow).wait()
            back = to_tokens(joined, ranges, axis, layout.tiles(), borrow).wait()
            name = f"{query}:{key} heads, {tokens} tokens{', borrowed' * borrow}"
            for i, h in enumerate(ranges):
                if not torch.equal(joined[i], whole[i][:, :, list(h[axis.rank])]):
                    found.append(f"{name}: tensor {i} differs after the way to heads")
                if not torch.equal(back[i], held[i][:, :, [head for ranks in h for head in ranks]]):
                    found.append(f"{name}: tensor {i} differs after the way back")
    return found


def attention_ms(mesh: Mesh, kernel: Kernel, mask: Mask, heads: Heads, times: int) -> float:
    """Return the median milliseconds of forward and backward on this rank's part of a row."""
    device = torch.device(mesh.device_type)
    layout = Layout(mask.length, 1, mesh.ulysses.size)
    attend, schedule = Attend(mesh, kernel), Schedule.of(mask, layout, 0)
    counts = (heads.query, heads.key, heads.key)
    q, k, v = (
        _normal(1, layout.shard_tokens, n, heads.dim, seed=i, device=device).requires_grad_()
        for i, n in enumerate(counts)
    )
    dout = _normal(1, layout.shard_tokens, heads.query, heads.dim, seed=3, device=device)

    def work() -> None:
        torch.autograd.grad(attend(q, k, v, schedule, Score(heads.dim**-0.5)), (q, k, v), dout)

    return median(rounds_ms(work, times, 2, device))


def _wrong_attention(mesh: Mesh, kernel: Kernel, name: str, heads: Heads, device: torch.device) -> list[str]:
    """Compare attention over all ranks with attention in float32 on this one, on a short row; list what differs."""
    size = mesh.ulysses.size
    tokens = 512 * size
    mask = Mask(tokens) if name == "dense" else Mask(tokens, (document_starts(tokens),))
    layout = Layout(tokens, 1, size)
    whole = [
        _normal(1, tokens, n, heads.dim, seed=i, device=device)
        for i, n in enumerate((heads.query, heads.key, heads.key, heads.query))
    ]
    wide = [t.float().requires_grad_() for t in whole[:3]]
    out = _plain(wide[0], wide[1], wide[2], mask, heads.dim**-0.5)
    expected = [out, *torch.autograd.grad(out, wide, whole[3].float())]
    at = torch.tensor(layout.indices(mesh.ulysses.rank), device=device)
    q, k, v = (t[:, at].contiguous().requires_grad_() for t in whole[:3])
    mine = Attend(mesh, kernel)(q, k, v, Schedule.of(mask, layout, 0), Score(heads.dim**-0.5))
    found = [mine, *torch.autograd.grad(mine, (q, k, v), whole[3][:, at].contiguous())]
    errors = [
        float((got.detach().float() - want.detach()[:, at]).norm() / want.detach()[:, at].norm())
        for got, want in zip(found, expected, strict=True)
    ]
    named = zip(("out", "dq", "dk", "dv"), errors, strict=True)
    return [f"{what} is off by {error:.1e}" for what, error in named if not error < _CLOSE]


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Attend from [1, S, H, D] to [1, S, K, D] by definition."""
    places = torch.arange(mask.length, device=q.device)
    starts = torch.tensor(mask.documents[0] if mask.documents else (0,), device=q.device)
    document = torch.bucketize(places, starts, right=True)
    sees = (places[:, None] >= places) & (document[:, None] == document)
    share = q.shape[2] // k.shape[2]
    keys, values = (t.repeat_interleave(share, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * scale
    weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, values)


def _ways(asked: Exchanging, results: Results, device: torch.device) -> dict[str, Mesh]:
    """Return a mesh that exchanges by collectives, and one that does by copy engines if that works here."""
    plain = build_mesh(data_parallel_ranks(asked.sp, None), Degrees(asked.sp, 1, ""), device.type)
    equipped, why = with_copy_engine(plain, device)
    results.content["decision"] = why
    return {"collectives": plain} | ({"copy engines": equipped} if equipped.ulysses.copier else {})


def _proven(results: Results, name: str, compare: Any) -> bool:
    """Run a comparison, once under a name; on failure there is a row that says so."""
    verdict = first_failure(compare)
    results.gates[name] = verdict
    tell(f"GATE {name}: {'ok' if verdict['ok'] else '; '.join(verdict['why'])}")
    if not verdict["ok"]:
        results.begin({"name": name})
        results.end_running("gate failed: " + "; ".join(verdict["why"]))
    results.save()
    return verdict["ok"]


def _meet(value: float) -> float:
    """Return rank 0's value on all ranks, which wait for it on their hosts: a GPU that has nothing to do rests."""
    held = [value]
    group: Any = dist.new_group(backend="gloo")
    dist.broadcast_object_list(held, src=0, group=group)
    return held[0]


def _normal(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=_dtype(device))


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _closed(results: Results) -> dict[str, Any] | None:
    results.save()
    return None if results.path is None else {**results.content, "path": str(results.path)}

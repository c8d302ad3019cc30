"""Milliseconds of the exchange of heads: every way is first compared with the definition, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan.bench.clock import Deadline, largest, median, rounds_ms, timed
from longspan.bench.gate import first_failure
from longspan.bench.results import DONE, Results, Target
from longspan.comm.exchange import to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.comm.symmetric import with_copy_engine
from longspan.layout import Layout
from longspan.mesh import Axis, Mesh, build_mesh, data_parallel_ranks
from longspan.once import tell
from longspan.plan.degrees import Degrees

STANDARD_BYTES, STANDARD_TOKENS = 512 << 20, 131_072
_FIGURES = {"q to heads, borrowed": "P7", "q to heads": "P7_ordinary"}
"""Results that are borrowed serve until the third exchange after; ordinary ones belong to the caller."""

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
    results = Results.open(target, "exchange", asked, device)
    for way, mesh in ways(asked, results, device).items():
        axis, heads = mesh.ulysses, asked.heads
        split = HeadSplit(heads.query, heads.key, axis.size)
        for name, counts, ranges in (
            ("q", (heads.query,), [split.query]),
            ("q, k, v", (heads.query, heads.key, heads.key), [split.query, split.key, split.key]),
        ):
            if not proven(results, f"{way} {name}", partial(unequal, axis, heads, device)):
                continue
            tokens = asked.payload_bytes // (sum(counts) * heads.dim * 2)
            held = [normal(1, tokens, n, heads.dim, device=device) for n in counts]
            joined = to_heads(held, ranges, axis).wait()
            works = {
                f"{direction}{', borrowed' * borrow}": partial(exchange, tensors, ranges, axis, borrow=borrow)
                for direction, exchange, tensors in (("to heads", to_heads, held), ("to tokens", to_tokens, joined))
                for borrow in ((False, True) if axis.copier else (False,))
            }
            for direction, work in works.items():
                seconds, _ = timed(lambda work=work: work().wait(), device)
                if not deadline.allows(seconds * (asked.times + _WARM_UP), device):
                    return closed(results)
                row = results.begin({"name": f"{name} {direction}", "way": way})
                spread = rounds_ms(lambda work=work: work().wait(), asked.times, _WARM_UP, device)
                row |= {"median_ms": round(largest(median(spread), device), 4)}
                row |= {"p90_ms": round(largest(sorted(spread)[len(spread) * 9 // 10], device), 4), "state": DONE}
                standard = asked.payload_bytes == STANDARD_BYTES and heads == Heads()
                if standard and row["name"] in _FIGURES:
                    row |= {"figure": _FIGURES[row["name"]], "value": row["median_ms"]}
                results.save()
                tell(f"EXCHANGE {row}")
    return closed(results)


def unequal(axis: Axis, heads: Heads, device: torch.device) -> list[str]:
    """Compare exchanges of what every rank can make for itself with the definition; list what differs."""
    found = []
    for query, key, tokens, tile in ((heads.query, heads.key, 4097, None), (7, 7, 1001, 256), (9, 3, 4096, 1024)):
        split, layout = HeadSplit(query, key, axis.size), Layout(tokens * axis.size, 1, axis.size, tile)
        ranges = [split.query, split.key, split.key]
        whole = [normal(1, layout.length, n, heads.dim, seed=i, device=device) for i, n in enumerate((query, key, key))]
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


def ways(asked: Exchanging, results: Results, device: torch.device) -> dict[str, Mesh]:
    """Return a mesh that exchanges by collectives, and one that does by copy engines if that works here."""
    plain = build_mesh(data_parallel_ranks(asked.sp, None), Degrees(asked.sp, 1, ""), device.type)
    equipped, why = with_copy_engine(plain, device)
    results.content["decision"] = why
    return {"collectives": plain} | ({"copy engines": equipped} if equipped.ulysses.copier else {})


def proven(results: Results, name: str, compare: Any) -> bool:
    """Run a comparison, once under a name; on failure there is a row that says so."""
    verdict = first_failure(compare)
    results.gates[name] = verdict
    tell(f"GATE {name}: {'ok' if verdict['ok'] else '; '.join(verdict['why'])}")
    if not verdict["ok"]:
        results.begin({"name": name})
        results.end_running("gate failed: " + "; ".join(verdict["why"]))
    results.save()
    return verdict["ok"]


def normal(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draw the same numbers on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype(device))


def dtype(device: torch.device) -> torch.dtype:
    """Return what is exchanged on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def closed(results: Results) -> dict[str, Any] | None:
    """Save results and return them."""
    results.save()
    return None if results.path is None else {**results.content, "path": str(results.path)}

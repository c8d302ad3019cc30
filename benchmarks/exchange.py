"""Milliseconds of the Ulysses exchange, and what it costs attention.

    torchrun --nproc-per-node 2 benchmarks/exchange.py --out benchmarks/results/exchange.json

Every way of exchanging is first compared bit for bit with the definition. Then: 512 MiB per rank, by collectives and by
copy engines; and forward and backward of causal attention over all GPUs against the same kernel on as many heads, on
one GPU alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # read when memory is shared; nothing here multicasts

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from longspan.attention.build import Attend
from longspan.attention.schedule import Schedule
from longspan.comm.exchange import to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.comm.symmetric import with_copy_engine
from longspan.kernels.protocol import Kernel, Request
from longspan.kernels.select import pick
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Axis, Mesh, build_mesh, data_parallel_ranks
from longspan.plan.degrees import Degrees

HEADS, KV_HEADS, DIM = 32, 8, 128
EXCHANGE_BYTES = 512 * 2**20
DOCUMENTS = (40000, 3000, 22000, 517, 30000, 12000, 8555)
"""Tokens of all documents of the packed row but the last, which takes the rest."""


def rounds(work: Callable[[], Any], times: int, warm_up: int) -> list[float]:
    """Return the milliseconds of each of `times` runs; they follow each other without a gap."""
    for _ in range(warm_up):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in zip(marks, marks[1:], strict=False)]


@cache
def hosts() -> Any:
    """Return a group in which the ranks meet on their hosts: a GPU that has nothing to do rests."""
    return dist.new_group(backend="gloo")


def slowest(milliseconds: float) -> float:
    """Return the largest value over the ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, milliseconds, group=hosts())
    return round(max(values), 4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=made, device="cuda", dtype=torch.bfloat16)


def unequal(axis: Axis) -> list[str]:
    """Compare exchanges of what every rank can make for itself with the definition, bit for bit."""
    found = []
    for heads, kv_heads, tokens, tile in (
        (32, 8, 4097, None),
        (7, 7, 1001, 256),
        (9, 3, 65536, 16384),
        (3, 1, 1, None),
    ):
        split, layout = HeadSplit(heads, kv_heads, axis.size), Layout(tokens * axis.size, 1, axis.size, tile)
        ranges = [split.query, split.key, split.key]
        whole = [normal(1, layout.length, n, DIM, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]
        at = torch.tensor(layout.indices(axis.rank), device="cuda")
        held = [t[:, at].transpose(1, 2).contiguous().transpose(1, 2) for t in whole]
        for borrow in (False, True):
            joined = to_heads(held, ranges, axis, layout.tiles(), borrow).wait()
            back = to_tokens(joined, ranges, axis, layout.tiles(), borrow).wait()
            name = f"{heads}:{kv_heads}{', borrowed' * borrow}"
            for i, h in enumerate(ranges):
                mine = list(h[axis.rank])
                if not torch.equal(joined[i], whole[i][:, :, mine]):
                    found.append(f"{name} to heads, tensor {i}")
                if not torch.equal(back[i], held[i][:, :, [head for ranks in h for head in ranks]]):
                    found.append(f"{name} to tokens, tensor {i}")
    return found


def exchanges(axis: Axis, times: int) -> dict[str, Any]:
    """Time exchanges of 512 MiB per rank, to heads and back; results are the caller's, or borrowed."""
    split = HeadSplit(HEADS, KV_HEADS, axis.size)
    found = {}
    for name, counts, ranges in (
        ("q", (HEADS,), [split.query]),
        ("q, k, v", (HEADS, KV_HEADS, KV_HEADS), [split.query, split.key, split.key]),
    ):
        tokens = EXCHANGE_BYTES // (sum(counts) * DIM * 2)
        held = [normal(1, tokens, n, DIM) for n in counts]
        joined = to_heads(held, ranges, axis).wait()
        works = {
            f"{direction}{', borrowed' * borrow}": partial(exchange, tensors, ranges, axis, borrow=borrow)
            for direction, exchange, tensors in (("to heads", to_heads, held), ("to tokens", to_tokens, joined))
            for borrow in ((False, True) if axis.copier else (False,))
        }
        for direction, work in works.items():
            spread = rounds(lambda work=work: work().wait(), times, 10)
            found[f"{name} {direction}"] = {
                "median_ms": slowest(statistics.median(spread)),
                "p90_ms": slowest(sorted(spread)[len(spread) * 9 // 10]),
            }
    return found


def attention(mesh: Mesh, kernel: Kernel, mask: Mask, heads: int, kv_heads: int, times: int) -> float:
    """Return the median milliseconds of attention's forward and backward on this rank's part of a row."""
    layout = Layout(mask.length, 1, mesh.ulysses.size)
    attend, schedule = Attend(mesh, kernel), Schedule.of(mask, layout, 0)
    q, k, v = (
        normal(1, layout.shard_tokens, n, DIM, seed=i).requires_grad_()
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    dout = normal(1, layout.shard_tokens, heads, DIM, seed=3)

    def work() -> None:
        torch.autograd.grad(attend(q, k, v, schedule, DIM**-0.5), (q, k, v), dout)

    return statistics.median(rounds(work, times, 2))


def shares(meshes: dict[str, Mesh], kernel: Kernel, tokens: int, times: int) -> dict[str, Any]:
    """Compare attention over the GPUs with its kernel on one GPU's heads while the others rest."""
    starts = [0]
    for length in DOCUMENTS:
        starts.append(starts[-1] + length * tokens // 131072)
    found: dict[str, Any] = {}
    for name, mask in (("dense", Mask(tokens)), ("packed", Mask(tokens, (tuple(starts),)))):
        size = dist.get_world_size()
        alone = 0.0
        if dist.get_rank() == 0:
            alone = attention(Mesh(device_type="cuda"), kernel, mask, HEADS // size, KV_HEADS // size, times)
        alone = slowest(alone)
        row: dict[str, Any] = {"kernel_alone_ms": alone}
        for way, mesh in meshes.items():
            row[f"{way}_ms"] = slowest(attention(mesh, kernel, mask, HEADS, KV_HEADS, times))
            row[f"{way}_share"] = round(alone / row[f"{way}_ms"], 4)
        found[name] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--attention-times", type=int, default=7)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    size = dist.get_world_size()
    plain = build_mesh(data_parallel_ranks(size, None), Degrees(size, 1, ""), "cuda")
    equipped, why = with_copy_engine(plain, device)
    meshes = {"nccl": plain} | ({"copy_engine": equipped} if equipped.ulysses.copier else {})
    kernel = pick(options.kernel, Request(device, torch.bfloat16, DIM, DIM, varlen=True))
    wrong = {way: unequal(mesh.ulysses) for way, mesh in meshes.items()}
    result: dict[str, Any] = {"decision": why, "wrong": wrong, "kernel": kernel.name, "figures": {}}
    if not any(wrong.values()):
        result["exchange"] = {way: exchanges(mesh.ulysses, options.times) for way, mesh in meshes.items()}
        result["attention"] = shares(meshes, kernel, options.tokens, options.attention_times)
        best = list(meshes)[-1]
        figures = result["exchange"][best]
        result["figures"] = {
            "P7": figures.get("q to heads, borrowed", figures["q to heads"])["median_ms"],
            "P7_ordinary": figures["q to heads"]["median_ms"],
            "P6": result["attention"]["dense"][f"{best}_share"],
            "P6_packed": result["attention"]["packed"][f"{best}_share"],
        }
    about = {"gpu": torch.cuda.get_device_name(), "gpus": size, "torch": torch.__version__, "cuda": torch.version.cuda}
    about |= {"nccl": ".".join(map(str, nccl.version())), "tokens": options.tokens}
    about |= {"commit": options.commit, "date": time.strftime("%Y-%m-%d")}
    if dist.get_rank() == 0:
        text = json.dumps(about | result, indent=1)
        print(text, flush=True)
        if options.out:
            with open(options.out, "w") as file:
                file.write(text + "\n")
    failed = any(wrong.values())
    dist.destroy_process_group()
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

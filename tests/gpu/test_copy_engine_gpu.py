"""The copy engine on two GPUs: bit for bit what collectives give, under compute, in a loop and inside attention."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import WORLD, check_on_gpus, join, own_gpu
from torch import Tensor

from longspan.attention.build import Attend
from longspan.attention.schedule import Schedule
from longspan.comm.exchange import to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.comm.symmetric import with_copy_engine
from longspan.kernels.protocol import Request, Score
from longspan.kernels.select import pick
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Mesh, build_mesh, data_parallel_ranks
from longspan.plan.degrees import Degrees

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


def on_meshes(rank: int, port: int, check: Callable[[Mesh, Mesh], None]) -> None:
    """Run a check, given the mesh as it is and the mesh with copy engines."""
    device = own_gpu(rank)
    join(rank, port)
    plain = build_mesh(data_parallel_ranks(WORLD, None), Degrees(WORLD, 1, ""), "cuda")
    equipped, why = with_copy_engine(plain, device, slot_bytes=4 * 2**20, lent_bytes=64 * 2**20)
    assert equipped.ulysses.copier is not None, why
    check(plain, equipped)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def tensors(tokens: int, heads: int, kv_heads: int, seed: int) -> list[Tensor]:
    made = torch.Generator("cuda").manual_seed(seed * WORLD + dist.get_rank())
    shapes = [(2, n, tokens, 64) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=made, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for s in shapes]


def differs(a: Tensor, b: Tensor) -> Tensor:
    return (a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).any()


def exchanges_under_compute(plain: Mesh, equipped: Mesh) -> None:
    """Keep several exchanges under way while matrix products run, ranks drift apart and memory is reused at once."""
    rows = ((8, 2, 4000, None), (7, 7, 3001, 700), (9, 3, 5000, 4096))
    for seed, ((heads, kv_heads, tokens, tile), borrow) in enumerate(product(rows, (False, True))):
        split, layout = HeadSplit(heads, kv_heads, WORLD), Layout(tokens * WORLD, 1, WORLD, tile)
        ranges, parts = [split.query, split.key, split.key], layout.tiles()
        square = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        wanted: list[Any] = []
        for number in range(8):
            sent = tensors(layout.shard_tokens, heads, kv_heads, seed * 100 + number)
            there = to_heads(sent, ranges, plain.ulysses, parts).wait()
            wanted.append((there, to_tokens(there, ranges, plain.ulysses, parts).wait()))
        flying: list[Any] = []
        wrong = torch.zeros((), device="cuda", dtype=torch.int32)

        def read(borrow: bool, wrong: Tensor = wrong, wanted: list[Any] = wanted, flying: list[Any] = flying) -> None:
            n, kind, pending, sent = flying.pop(0)
            found = pending.wait()
            for a, b in zip(found, wanted[n][kind], strict=True):
                wrong += differs(a, b)
            for t in [*(found if borrow else []), *sent]:
                t.fill_(torch.nan)

        for number in range(8):
            for _ in range(30 if (number + dist.get_rank()) % 2 else 1):
                square = (square @ square).clamp(-1, 1)
            sent = tensors(layout.shard_tokens, heads, kv_heads, seed * 100 + number)
            flying.append((number, 0, to_heads(sent, ranges, equipped.ulysses, parts, borrow), sent))
            del sent
            while len(flying) > 2:
                read(borrow)
            flying.append((number, 1, to_tokens(wanted[number][0], ranges, equipped.ulysses, parts, borrow), []))
            while len(flying) > 2:
                read(borrow)
        while flying:
            read(borrow)
        assert not wrong.item(), (seed, borrow)


def attention_is_the_same(plain: Mesh, equipped: Mesh) -> None:
    """The kernel sees the same bits, and a forward is deterministic; a backward adds up in any order."""
    for mask in (Mask(2050), Mask(2050, ((0, 100, 1500),))):
        layout = Layout(mask.length, 1, WORLD)
        schedule = Schedule.of(mask, layout, 0)
        kernel = pick("aten-flash", Request(torch.device("cuda"), torch.bfloat16, 64, 64, varlen=mask.packed))
        results = []
        for mesh in (plain, equipped):
            q, k, v = (t[:1].requires_grad_() for t in tensors(layout.shard_tokens, 8, 2, 5))
            out = Attend(mesh, kernel)(q, k, v, schedule, Score(0.125))
            out.sum().backward()
            results.append([out.detach(), q.grad, k.grad, v.grad])
        assert torch.equal(results[0][0], results[1][0])
        for a, b in zip(*results, strict=True):
            assert a is not None and b is not None
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_exchanges_under_compute() -> None:
    check_on_gpus(on_meshes, exchanges_under_compute)


def test_attention_over_copy_engines() -> None:
    check_on_gpus(on_meshes, attention_is_the_same)

"""Attention of the GPT-OSS shape over two GPUs: sinks and windows round no worse than the kernel does on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import WORLD, check_on_gpus, join, own_gpu
from torch import Tensor

import longspan
from longspan.kernels.protocol import wide
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Mesh, build_mesh, data_parallel_ranks
from longspan.plan.degrees import Degrees

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]

TOKENS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 2048, 64, 8, 64, 128
NAMES = ("out", "dq", "dk", "dv", "dsinks")


def operands(dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v, sinks and dout, the same on every rank, in values that bf16 holds."""
    noise = torch.Generator("cuda").manual_seed(7)
    shapes = [(1, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes += [(HEADS,), shapes[0]]
    return [torch.randn(s, generator=noise, device="cuda").bfloat16().to(dtype) for s in shapes]


def one_device(mask: Mask) -> list[Tensor]:
    """Return out and the gradients of q, k, v and sinks by the definition, in fp64."""
    q, k, v, sinks, dout = operands(torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v, sinks)]
    at = torch.arange(TOKENS, device="cuda")
    seen = at[:, None] >= at
    if mask.window is not None:
        seen &= at[:, None] - at < mask.window
    for start in mask.documents[0] if mask.documents else ():
        seen &= (at[:, None] >= start) == (at >= start)
    keys, values = (t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bshd->bhqs", q, keys) * HEAD_DIM**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(1, HEADS, TOKENS, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    out = torch.einsum("bhqs,bshd->bqhd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def divided(mask: Mask, mesh: Mesh, kernel: str) -> list[Tensor]:
    """Return the same of this rank's tokens in bf16, the gradient of the sinks added up over the ranks."""
    layout = Layout(TOKENS, mesh.ring.size, mesh.ulysses.size)
    mine = torch.tensor(layout.indices(mesh.sequence.rank), device="cuda")
    q, k, v, sinks, dout = operands(torch.bfloat16)
    leaves = [t[:, mine].requires_grad_() for t in (q, k, v)] + [sinks.float().requires_grad_()]
    out = longspan.attend(leaves[0], leaves[1], leaves[2], mask, mesh, kernel=kernel, sinks=leaves[3])
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout[:, mine])]
    if mesh.sequence.size > 1:
        dist.all_reduce(found[-1], group=mesh.sequence.group)
    return found


def errors(found: list[Tensor], wanted: list[Tensor], layout: Layout, rank: int) -> dict[str, float]:
    mine = torch.tensor(layout.indices(rank), device="cuda")
    parts = [t[:, mine] for t in wanted[:-1]] + wanted[-1:]
    pairs = zip(NAMES, found, parts, strict=True)
    return {name: float((a.to(wide(b.dtype)) - b).norm() / b.norm()) for name, a, b in pairs}


def check(rank: int, port: int, kernel: str) -> None:
    own_gpu(rank)
    join(rank, port)
    alone = build_mesh(data_parallel_ranks(1, None), Degrees(1, 1, ""), "cuda")
    meshes = [build_mesh(data_parallel_ranks(WORLD, None), Degrees(u, r, ""), "cuda") for u, r in ((2, 1), (1, 2))]
    for mask in (Mask(TOKENS), Mask(TOKENS, None, WINDOW), Mask(TOKENS, ((0, 700, 1500),), WINDOW)):
        wanted = one_device(mask)
        own = errors(divided(mask, alone, kernel), wanted, Layout(TOKENS), 0)
        for mesh in meshes:
            layout = Layout(TOKENS, mesh.ring.size, mesh.ulysses.size)
            found = errors(divided(mask, mesh, kernel), wanted, layout, mesh.sequence.rank)
            if rank == 0:
                print(kernel, mask, layout, {n: f"{found[n]:.1e} of {own[n]:.1e}" for n in NAMES}, flush=True)
            for name in NAMES:
                assert 0 < own[name] < 2e-2, (mask, name, own)
                assert found[name] <= 2 * own[name], (mask, layout, name, found, own)
    dist.destroy_process_group()


@pytest.mark.parametrize("kernel", ["aten-flash", "auto"])
def test_gpt_oss_attention_rounds_like_its_kernel(kernel: str) -> None:
    check_on_gpus(check, kernel)

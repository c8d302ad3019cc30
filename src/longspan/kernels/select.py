"""The choice of a kernel by name: longspan's names, Hugging Face's, or `auto`."""

from __future__ import annotations

import re

import torch

from longspan.errors import KernelError
from longspan.kernels.aten_flash import AtenFlash
from longspan.kernels.compose import Either, EqualDims
from longspan.kernels.cpu import Cpu
from longspan.kernels.cudnn import Cudnn
from longspan.kernels.fa4 import FlashAttention4
from longspan.kernels.flash_attn import FlashAttention2, FlashAttention3
from longspan.kernels.guard import Guard
from longspan.kernels.protocol import Kernel, Request
from longspan.kernels.reference import Reference

_VENDORS = (Reference, Cpu, AtenFlash, Cudnn, FlashAttention4, FlashAttention3, FlashAttention2)

_HUGGING_FACE = {"flash_attention_2": "fa2", "flash_attention_3": "fa3", "flash_attention_4": "fa4"}
"""Hugging Face's names for the kernels of one package. Source: `AttentionInterface` of transformers 5.17."""

_HUB = re.compile(r"[^/:]+/[^/:]+(@[^/:]+)?(:[^/:]+)?")
"""A kernel on the Hugging Face Hub, `org/name[@revision][:function]`. Source: `is_kernel` of transformers 5.17."""

_EAGER = "it needs a mask of all queries by all keys"


def available(device: torch.device | str) -> dict[str, str | None]:
    """Say of each kernel why it cannot run on a device; None where it can."""
    return {vendor.name: vendor.missing(torch.device(device)) for vendor in _VENDORS}


def pick(name: str, request: Request) -> Kernel:
    """Return the kernel of this name, or the best for `auto`, guarded against 32-bit indices.

    A kernel named explicitly is used or refused, never replaced. `auto` is `cpu` on a CPU, or `reference` where scores
    are capped; on CUDA it is `fa4` if it can serve the request, else `cudnn` for the dense calls it can do with
    `aten-flash` for the rest, which is also what `sdpa` stands for, or `fa3` or `fa2` where scores are capped. Values
    of another head_dim than queries are padded where a kernel wants them equal.

    Args:
        name: `auto`, a key of `available`, or a Hugging Face attention name.
        request: what the kernel must be able to do.

    Raises:
        KernelError: an unknown name, or a kernel that is missing or cannot serve the request; it lists those that can.
    """
    if why := _refused_name(name):
        raise KernelError(f"Attention '{name}' cannot be used: {why}. {_usable(request)}")
    reasons = {}
    for candidate in _candidates(name, request):
        kernel = candidate if request.head_dim == request.v_head_dim else _padded(candidate, request)
        why = kernel.refuses(request)
        if why is None:
            return Guard(kernel)
        reasons[kernel.name] = why
    if not reasons:
        raise KernelError(f"There is no attention kernel '{name}'. {_usable(request)}")
    told = "; ".join(f"{kernel}: {why}" for kernel, why in reasons.items())
    raise KernelError(f"Attention '{name}' cannot be used ({told}). {_usable(request)}")


def _candidates(name: str, request: Request) -> list[Kernel]:
    """List the kernels that a name stands for, best first; empty for an unknown name."""
    if name in ("auto", "sdpa"):
        if request.device.type != "cuda":
            return [Cpu(), *([Reference()] if request.softcap else [])]
        first: list[Kernel] = [FlashAttention4()] if name == "auto" else []
        last: list[Kernel] = [FlashAttention3(), FlashAttention2()] if name == "auto" and request.softcap else []
        return [*first, _dense_first(request), *last]
    name = _HUGGING_FACE.get(name, name)
    return [vendor() for vendor in _VENDORS if vendor.name == name]


def _dense_first(request: Request) -> Kernel:
    """Return cuDNN for the calls it can do and PyTorch's flash attention for the rest, or the latter alone."""
    cudnn, flash = Cudnn(), AtenFlash()
    dim = max(request.head_dim, request.v_head_dim)
    never = cudnn.refuses(Request(request.device, request.dtype, dim, dim, softcap=request.softcap))
    return flash if never else Either(cudnn, flash)


def _padded(kernel: Kernel, request: Request) -> Kernel:
    return kernel if kernel.refuses(request) is None else EqualDims(kernel)


def _refused_name(name: str) -> str | None:
    """Say why a Hugging Face name is known but not served, or None."""
    if name.startswith("paged|"):
        return f"paged attention is for generation{', and ' + _EAGER if name.endswith('eager') else ''}"
    if name == "eager":
        return _EAGER
    if name == "flex_attention":
        return "it has no backward that starts from a final log-sum-exp, and every mask here has a faster kernel"
    if _HUB.fullmatch(name):
        return "kernels from the Hub are not supported"
    return None


def _usable(request: Request) -> str:
    """Say which kernels can serve a request."""
    names = []
    for vendor in _VENDORS:
        kernel = vendor()
        if _padded(kernel, request).refuses(request) is None:
            names.append(kernel.name)
    return f"Kernels that can serve {request}: {', '.join(names) or 'none'}."

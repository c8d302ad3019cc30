"""What the CUDA kernels have in common: devices, operands and packages they need."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from longspan.errors import KernelError
from longspan.kernels.protocol import Request


def device_problem(device: torch.device, oldest: tuple[int, int] = (8, 0)) -> str | None:
    """Say why a device is not a CUDA device of at least compute capability `oldest`, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if not torch.cuda.is_available():
        return "this process sees no CUDA device"
    found = torch.cuda.get_device_capability(device)
    if found < oldest:
        return f"it needs compute capability {oldest[0]}.{oldest[1]}, this device has {found[0]}.{found[1]}"
    return None


def operand_problem(request: Request, largest_head_dim: int) -> str | None:
    """Say why operands are not fp16 or bf16 with one head_dim that is a multiple of 8, or None."""
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 and fp16, not {str(request.dtype).removeprefix('torch.')}"
    if request.v_head_dim != request.head_dim:
        return f"queries and values must have one head_dim, not {request.head_dim} and {request.v_head_dim}"
    if request.head_dim % 8 or request.head_dim > largest_head_dim:
        return f"head_dim must be a multiple of 8 up to {largest_head_dim}, not {request.head_dim}"
    return None


def import_problem(module: str, package: str) -> str | None:
    """Say why a module of an optional package cannot be imported, or None.

    A compiled package that does not fit the installed torch fails in many ways, each of which means that it cannot be
    used; the reason is kept.
    """
    try:
        import_module(module)
    except Exception as error:
        return f"{module} of {package} cannot be imported ({type(error).__name__}: {error})"
    return None


def load(module: str, package: str) -> ModuleType:
    """Import a module of an optional package.

    Raises:
        KernelError: it cannot be imported.
    """
    if why := import_problem(module, package):
        raise KernelError(f"{why}. Install {package}, or use kernel 'auto'.")
    return import_module(module)

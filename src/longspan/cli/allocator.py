"""The settings of memory allocators, which they read from the environment once."""

from __future__ import annotations

import os

EXPANDABLE = "expandable_segments:True"
_OURS = "PYTORCH_CUDA_ALLOC_CONF"  # the name that every version reads
_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_PINNING = "DS_PIN_MEMORY_BACKEND"
_NAMES = (_OURS, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def choose_allocator() -> None:
    """Let GPU memory grow in place, for this process and those it starts, unless the user has chosen.

    Long sequences ask for a few very large blocks of changing sizes, which fixed segments fragment.
    """
    if allocator() is None:
        os.environ[_OURS] = EXPANDABLE
    os.environ.setdefault(_MULTICAST, "1")  # exchanges by copy engines share memory, and multicast nothing


def allocator() -> str | None:
    """Return the setting that is in force, as NAME=value; None if there is none."""
    return next((f"{name}={os.environ[name]}" for name in _NAMES if os.environ.get(name)), None)


def pinned_memory() -> str | None:
    """Return how DeepSpeed is set to lock host memory, as NAME=value; None if it is left at torch's way."""
    value = os.environ.get(_PINNING)
    return f"{_PINNING}={value}" if value else None


def pinning_problem() -> str | None:
    """Say what is wrong with that setting; None where nothing is."""
    if os.environ.get(_PINNING, "").strip().lower() != "native":
        return None
    return (
        f"{_PINNING}=native locks host memory without torch, and where CUDA does not know of it offloaded checkpoints "
        f"are refused, as copies would wait: unset it, or set {_PINNING}=torch"
    )

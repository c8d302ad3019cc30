"""What one process does for all of them."""

from __future__ import annotations

import sys

import torch.distributed as dist


def is_first() -> bool:
    """Whether this is the first process, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def tell(text: str) -> None:
    """Print on stderr, once for all processes."""
    if is_first():
        print(text, file=sys.stderr, flush=True)

"""Processes with a GPU each, started for one test."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

WORLD = 2


def check_on_gpus(check: Callable[..., None], *args: Any) -> None:
    """Run `check(rank, port, *args)` in a process per GPU, and raise what one of them raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(check, (port, *args), WORLD)


def own_gpu(rank: int) -> torch.device:
    """Make the process use its GPU alone."""
    os.environ["LOCAL_RANK"], os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = str(rank), "1"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def join(rank: int, port: int, backend: str = "nccl") -> None:
    """Join the processes into a group."""
    address, device = f"tcp://127.0.0.1:{port}", torch.device("cuda", rank)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=WORLD, device_id=device)

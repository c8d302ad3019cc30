"""Look at the machine that a run trains on."""

from __future__ import annotations

import os
import platform
import socket

import psutil
import torch

from longspan.report.facts import Device, Place


def devices() -> list[Device]:
    """Return the GPUs of this host and the host itself, with their memory."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found = [Device(type="cuda", name=gpu.name, memory_bytes=gpu.total_memory) for gpu in gpus]
    memory_bytes = psutil.virtual_memory().total
    return [*found, Device(type="cpu", name=f"{os.cpu_count()} CPU cores", memory_bytes=memory_bytes)]


def place(device: torch.device, processes: int) -> Place:
    """Return where a run trains."""
    return Place(
        host=socket.gethostname(),
        platform=platform.platform(),
        processes=processes,
        device=device.type,
        devices=devices(),
    )

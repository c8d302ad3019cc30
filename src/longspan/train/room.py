"""Refuse a model that there is no room to build, before it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.config import ModelConfig
from longspan.errors import ConfigError
from longspan.integrations.models import load_model_config
from longspan.integrations.quantize import needed_bytes
from longspan.integrations.transformers.automatic import host_bytes
from longspan.integrations.transformers.parts import blocks_of

Build = Callable[[bool], Any]
"""Builds a model on the CPU, or, given True, without weights on the meta device."""

_SMALLER = "or take a smaller model or model.dtype."


def blank_model(build: Build, device: torch.device, engine: str, compute_dtype: torch.dtype | None) -> Any | None:
    """Return the model without weights, where the first process alone is to build it with them.

    None where each process builds the whole: one alone, or packed weights.

    Args:
        device: where weights come to.
        engine: who will hold them.

    Raises:
        ConfigError: they are more than the device has free.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes == 1:
        return None
    blank = build(True)
    if getattr(blank.config, "quantization_config", None) is not None:
        return None
    if engine in ("fsdp2", "zero-3"):
        check_share(blank, device, processes, compute_dtype)
    else:
        check_memory(blank, device)
    return blank


def check_memory(model: Any, device: torch.device, quantization: str = "none") -> None:
    """Refuse a model whose weights, packed if they will be, are more than a GPU has free; other devices are not asked.

    Raises:
        ConfigError: with both numbers.
    """
    if device.type != "cuda":
        return
    needed = needed_bytes(model, device, quantization)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if needed > free_bytes:
        raise ConfigError(
            f"The model's weights need {needed:,} bytes, but {device} has {free_bytes:,} bytes free, and come there "
            "whole, before any sharding. Free the GPU, start more processes with engine: fsdp2 or zero-3, to which "
            f"unpacked weights come in parts, {_SMALLER}"
        )


def check_share(model: Any, device: torch.device, processes: int, compute_dtype: torch.dtype | None) -> None:
    """Refuse a model whose shards, and what is whole at a time beside them, are more than a GPU has free.

    While weights come, that is a layer, or what is outside layers; while the model runs, both, in the type that it
    computes in.

    Args:
        model: on the meta device.
        processes: that share the weights.

    Raises:
        ConfigError: with the numbers.
    """
    if device.type != "cuda":
        return
    blocks = blocks_of(model)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    layer = max(_size(block.parameters()) for block in blocks)
    outside = _size(p for p in model.parameters() if id(p) not in inside)
    share = -(-_size(model.parameters()) // processes)
    running = 1.0 if compute_dtype is None else compute_dtype.itemsize / model.dtype.itemsize
    whole = max(layer, outside, round(running * (layer + outside)))
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if share + whole > free_bytes:
        raise ConfigError(
            f"Of the model's weights {device} must hold {share:,} bytes as its share of {processes}, and {whole:,} of "
            f"what is whole at a time, a layer and what is outside layers, but it has {free_bytes:,} bytes free. Free "
            f"the GPU, start more processes, {_SMALLER}"
        )


def check_host(model: nn.Module, settings: ModelConfig) -> None:
    """Refuse a model that this process's host has no memory for; files in the model's own type are mapped, not read.

    Args:
        model: on the meta device.

    Raises:
        ConfigError: with the numbers.
    """
    stored = getattr(load_model_config(settings), "dtype", None) if settings.init == "pretrained" else None
    if stored == getattr(torch, settings.dtype):
        return
    needed, free_bytes = _size(model.parameters()), host_bytes(psutil.virtual_memory().available)
    if needed > free_bytes:
        raise ConfigError(
            f"The first process builds the model on its host, where its weights need {needed:,} bytes, but "
            f"{free_bytes:,} are available. Free host memory, raise the container's limit, {_SMALLER}"
        )


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

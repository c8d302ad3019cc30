"""Make an optimizer by name, or say why it cannot serve a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from longspan.errors import ConfigError
from longspan.optim import low_bit
from longspan.optim.host import HostAdamW, host_bytes, local
from longspan.optim.memory import available_bytes
from longspan.weights import whole_shape

KINDS = ("adamw", "adamw8bit", "adamw-bf16-sr", "adamw-host")
_LOW_BIT = ("adamw8bit", "adamw-bf16-sr")
_FUSED_DEVICES = ("cuda", "cpu")
_GIB = 2**30

Named = list[tuple[str, nn.Parameter]]


def build_optimizer(
    kind: str,
    module: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Make AdamW for the parameters of a module that require gradients, in the form they have now.

    Args:
        kind: "adamw": states in the parameters' type, beside them. "adamw8bit": states of 8 bits (torchao).
            "adamw-bf16-sr": bfloat16 parameters and states, updates rounded stochastically (torchao). "adamw-host":
            float32 master parameters and states in host memory.
        module: after the engine has wrapped or sharded it.
        weight_decay: of matrices; vectors (norms, biases) do not decay.

    Raises:
        ConfigError: an unknown kind, a package that is missing, nothing to train, or parameters that it cannot serve.

    Cost: bytes per trained parameter of this process, beside parameter and gradient: adamw two of the parameters'
        elements, adamw8bit 2, adamw-bf16-sr 4, adamw-host 12 on the host and none on the device.
    """
    check_kind(kind)
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigError("No parameter requires a gradient, so there is nothing to optimize; unfreeze some.")
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in trained if len(whole_shape(p)) >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in trained if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
    if kind == "adamw":
        fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for _, p in trained)
        return torch.optim.AdamW(groups, fused=fused, **options)
    if kind == "adamw-host":
        _check_host(trained)
        return HostAdamW(groups, **options)
    _check_low_bit(kind, trained)
    return low_bit.optimizer(kind, groups, options)


def check_kind(kind: str) -> None:
    """Refuse a kind that does not exist or whose package is not installed.

    Raises:
        ConfigError: with the way out.
    """
    if kind not in KINDS:
        raise ConfigError(f"Unknown optimizer {kind!r}; use {', '.join(KINDS)}.")
    if kind in _LOW_BIT:
        low_bit.require(kind)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, also where it is held in a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _check_host(trained: Named) -> None:
    """Refuse parameters that updates on the host cannot reach, and states that the host has no room for.

    Raises:
        ConfigError: with the numbers.
    """
    for name, parameter in trained:
        where = local(parameter)
        if where.device.type not in ("cuda", "cpu"):
            raise ConfigError(
                f"Optimizer adamw-host serves parameters on cuda and cpu, but {name} is on {where.device}; use adamw."
            )
        if not where.is_contiguous():
            raise ConfigError(
                f"Optimizer adamw-host needs contiguous parameters, but {name} has strides {where.stride()} for shape "
                f"{tuple(where.shape)}: make it contiguous, or use adamw."
            )
    needed_bytes = host_bytes(p for _, p in trained)
    free_bytes = available_bytes()
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"Optimizer adamw-host needs {needed_bytes / _GIB:.1f} GiB of host memory in this process for master "
            f"parameters and moments, but {free_bytes / _GIB:.1f} GiB are available. Shard over more processes with "
            "engine fsdp2, or use adamw8bit."
        )


def _check_low_bit(kind: str, trained: Named) -> None:
    """Refuse what torchao would compute wrongly, or fail at in the first step.

    Raises:
        ConfigError: with the first parameter it is about.
    """
    for name, parameter in trained:
        dtype, sharded = parameter.dtype, isinstance(parameter, DTensor)
        if kind == "adamw-bf16-sr" and dtype != torch.bfloat16:
            raise ConfigError(
                f"Optimizer adamw-bf16-sr rounds to bfloat16 parameters, but {name} is {_name(dtype)}: set model.dtype "
                "to bfloat16, or use adamw."
            )
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"Optimizer {kind} computes in float32, but {name} is {_name(dtype)}: set model.dtype to float32 or "
                "bfloat16, or use adamw."
            )
        if kind == "adamw8bit" and sharded and dtype == torch.bfloat16:
            raise ConfigError(
                f"Optimizer adamw8bit cannot step bfloat16 parameters that are sharded, such as {name}: torchao fails "
                "at it. Set model.dtype to float32 with compute_dtype bfloat16, or use adamw-bf16-sr or adamw-host."
            )
        if dtype == torch.bfloat16 and not sharded and _world_size() > 1:
            raise ConfigError(
                f"Optimizer {kind} rounds bfloat16 parameters at random, and {name} has a copy in each of "
                f"{_world_size()} processes, which would drift apart: use engine fsdp2, adamw or adamw-host."
            )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

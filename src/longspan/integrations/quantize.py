"""Pack the weights of a model's decoder layers, for training adapters beside them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ConfigError
from longspan.stream.quantized import whole_weight

_PACKAGES = {"nf4": "bitsandbytes", "int8": "torchao"}


_ENGINES = {"nf4": ("single", "ddp", "fsdp2"), "int8": ("single",)}
"""Engines that can hold packed weights: torchao's can be neither broadcast nor sharded, DeepSpeed's are of one type."""


def check_quantization(kind: str, engine: str) -> None:
    """Refuse a kind whose package is not installed, or that an engine cannot hold.

    Raises:
        ConfigError: with the way out.
    """
    engines = _ENGINES.get(kind, (engine,))
    if engine not in engines:
        raise ConfigError(f"model.quantization {kind} does not go with engine {engine}: set engine: {engines[-1]}.")
    package = _PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"model.quantization: {kind} needs the package {package}, which is not installed: pip install {package}."
        )


def quantize_layers(model: PreTrainedModel, kind: str, device: torch.device) -> None:
    """Move a model to its device, packing the linear modules of its decoder layers one by one on the way.

    Embedding, norms and head stay as they are. Packed weights are frozen.

    Args:
        kind: `nf4` (4 bits in blocks of 64, scales in 8 bits; bitsandbytes), `int8` (8 bits with a scale per row;
            torchao), or `none`.

    Cost: one weight at a time lies unpacked on the device.
    """
    if kind != "none":
        for parent, name, linear in list(_linears(model)):
            setattr(parent, name, (_nf4 if kind == "nf4" else _int8)(linear, device))
        if kind == "nf4":
            model.is_loaded_in_4bit = True  # pyright: ignore[reportArgumentType]  # PEFT asks for it
    model.to(device)  # pyright: ignore[reportArgumentType]


def needed_bytes(model: PreTrainedModel, device: torch.device, kind: str) -> int:
    """Return the bytes that `quantize_layers` puts on a device, about, of what is not there yet."""
    packed = {"none": None, "nf4": 0.53, "int8": 1.02}[kind]
    share = {id(linear.weight): packed for _, _, linear in _linears(model)} if packed else {}
    moved = (t for t in (*model.parameters(), *model.buffers()) if t.device != device)
    return round(sum(t.numel() * share.get(id(t), t.element_size()) for t in moved))


def dequantize_layers(model: PreTrainedModel) -> None:
    """Give packed modules the plain weights that they stand for."""
    for parent, name, linear in list(_linears(model)):
        weight = whole_weight(linear)
        if weight is not None:
            plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
            plain.weight, plain.bias = nn.Parameter(weight), linear.bias
            setattr(parent, name, plain)
    model.is_loaded_in_4bit = False  # pyright: ignore[reportArgumentType]


def _linears(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear modules of the trunk, each with its place."""
    for parent in model.base_model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def _nf4(linear: nn.Linear, device: torch.device) -> nn.Module:
    import bitsandbytes as bnb  # pyright: ignore[reportMissingImports]

    dtype = linear.weight.dtype
    packed: Any = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    packed.support_avx512bf16_for_cpu = False  # else its weights are repacked in eval, and lost for training
    packed.weight = bnb.nn.Params4bit(
        linear.weight.detach(), requires_grad=False, quant_type="nf4", compress_statistics=True, module=packed
    )
    packed.bias = linear.bias
    return packed.to(device)


def _int8(linear: nn.Linear, device: torch.device) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear.to(device)
    quantize_(linear, Int8WeightOnlyConfig())
    linear.weight.requires_grad_(False)
    return linear

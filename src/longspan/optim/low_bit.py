"""torchao's optimizers; nothing else imports torchao."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import ConfigError

_PIECE_ELEMENTS = 1 << 24


def require(kind: str) -> None:
    """Raise unless torchao is installed, without importing it.

    Raises:
        ConfigError: with the command that installs it.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"Optimizer {kind} needs torchao, which is not installed: pip install 'torchao>=0.18'. Without it, use "
            "adamw or adamw-host."
        )


def optimizer(kind: str, groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Make a torchao optimizer; bfloat16 parameters are rounded stochastically, as to nearest loses small updates."""
    with _quiet():
        from torchao.optim import AdamW8bit, _AdamW  # pyright: ignore[reportMissingImports]
    made = AdamW8bit if kind == "adamw8bit" else _AdamW
    return made(groups, bf16_stochastic_round=True, **options)


def packs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's states are of 8 bits, where they are large enough."""
    return type(optimizer).__name__ == "AdamW8bit" and type(optimizer).__module__.startswith("torchao.")


def is_packed(state: Tensor) -> bool:
    """Whether a process's part of a state is of 8 bits, with a scale per block of elements."""
    return type(state).__name__ == "OptimState8bit"


@torch.no_grad()
def unpacked(state: Any) -> Any:
    """Return the numbers that a state stands for; where it is packed as float32, on the host.

    Cost: temporaries of 16M elements at a time on the device of the state.
    """
    if not is_packed(state):
        return state
    from torchao.optim.quant_utils import dequant_with_qmap  # pyright: ignore[reportMissingImports]

    blocks = state.codes.view(len(state.scale), -1)
    values = torch.empty(blocks.shape, dtype=torch.float32)
    for rows in _pieces(blocks):
        values[rows] = dequant_with_qmap(blocks[rows], state.qmap, state.scale[rows])
    return values.view(state.shape)


def buffer(optimizer: Any, parameter: nn.Parameter, signed: bool) -> Tensor:
    """Make an empty state of a parameter as the optimizer would, sharded as the parameter is."""
    return optimizer._new_buffer(parameter, signed)


@torch.no_grad()
def fill(state: Any, values: Tensor, scale: Tensor | None) -> None:
    """Pack numbers into a process's part of a state.

    Args:
        values: float32, shaped as the state, on any device.
        scale: of each block, with which values that were unpacked by it give the bytes that they had; None for that of
            the block's largest value.

    Cost: temporaries of 16M elements at a time on the device of the state.
    """
    if not is_packed(state):
        state.copy_(values)
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap  # pyright: ignore[reportMissingImports]

    blocks = values.reshape(len(state.scale), -1)
    if scale is None:
        for rows in _pieces(blocks):
            state.scale[rows] = blocks[rows].to(state.device).abs().amax(-1).clip(1e-12)  # as torchao does
    else:
        state.scale.copy_(scale)
    codes = state.codes.view(blocks.shape)
    for rows in _pieces(blocks):
        divisor = state.scale[rows, None]
        share = blocks[rows].to(state.device) / divisor.where(divisor != 0, 1)
        codes[rows] = quantize_8bit_with_qmap(share, state.qmap)


def _pieces(blocks: Tensor) -> Iterator[slice]:
    step = max(1, _PIECE_ELEMENTS // blocks.shape[1])
    return (slice(start, start + step) for start in range(0, len(blocks), step))


@contextmanager
def _quiet() -> Iterator[None]:
    # At import torchao warns of each of its libraries that fits another GPU or Python; no optimizer uses them.
    logger = logging.getLogger("torchao")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""torchao's optimizers; nothing else imports torchao."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from longspan.errors import ConfigError


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

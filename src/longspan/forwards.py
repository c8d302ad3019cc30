"""Modules whose `forward` something else stands in for, on the instance alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Forwards:
    """Remember what was replaced, and give it back; false when nothing is."""

    def __init__(self) -> None:
        self._own: list[tuple[nn.Module, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._own)

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Let `forward` stand in for a module's own."""
        self._own.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def restore(self) -> None:
        """Give all modules their own forward back; doing so again does nothing."""
        for module, forward in self._own:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward
        self._own.clear()

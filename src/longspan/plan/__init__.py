"""Decide how to train a model, and predict its memory and its speed: `longspan.plan(model, ...)`.

The package can be called: `longspan.plan("llama-8b", seq_len=1 << 20, world_size=2)` returns a `Plan`. The arguments
are those of `longspan.integrations.planning.plan`, which says what they mean.
"""

from __future__ import annotations

import inspect
import sys
import types
from importlib import import_module
from typing import Any


class _CallablePackage(types.ModuleType):
    """A package of decisions, and a function that makes them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `longspan.integrations.planning.plan`."""
        return _function()(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's, for `inspect.signature`, editors and notebooks."""
        return inspect.signature(_function())


def _function() -> Any:
    return import_module("longspan.integrations.planning").plan


sys.modules[__name__].__class__ = _CallablePackage

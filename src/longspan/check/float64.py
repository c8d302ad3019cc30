"""Whole models in float64: transformers computes norms, rotary tables, routers and softmaxes in float32 by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Turns every request for float32 into one for float64, in the code of any library that runs inside it.

    Without it both models round through float32 in the same places, but gradients that differ by a power-free factor
    (3/N against 1/N) round differently there, by 1e-7.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with float64 in place of float32."""
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is Tensor.float:
            return args[0].to(torch.float64, **kwargs)
        return func(*(_widened(value) for value in args), **kwargs)


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Compute in float64 whatever is built and run inside; backward by `torch.autograd.backward`.

    (`Tensor.backward` is itself a function that a mode handles, so the mode is off while it runs.)
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(default)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value

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

    Without it both models round through float32 in the same places, but gradients that differ by a factor such as 3/N
    against 1/N round differently there, by 1e-7.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func` with float64 in place of float32."""
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is Tensor.float:
            return args[0].to(torch.float64, **kwargs)
        if func is Tensor.backward:
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
            return self._differentiate(torch.autograd.backward, args, kwargs)
        if func in (torch.autograd.backward, torch.autograd.grad):
            return self._differentiate(func, args, kwargs)
        return func(*(_widened(value) for value in args), **kwargs)

    def _differentiate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A mode is off while it handles a call, and autograd runs backward under what is on when it is called. So the
        # mode is switched on again and the call told not to ask for it, else it would come back here for ever.
        autograd: Any = torch.autograd
        asks = autograd.has_torch_function
        autograd.has_torch_function = lambda _: False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            autograd.has_torch_function = asks


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Compute in float64 whatever is built and run inside, forward and backward."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(default)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value

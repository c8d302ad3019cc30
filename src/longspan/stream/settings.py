"""A layer as it was in its forward: run again in backward, it must do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor, nn

from longspan.errors import TrainingError
from longspan.stream.quantized import whole_weights

_FOLDED = "merged_adapters"
"""Where layers of PEFT list the adapters that are folded into the weights, which cannot be put back as a name can."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Settings:
    """The settings of a layer's modules and what is trained of it, taken in forward.

    Settings are plain values that a module holds: whether it trains, a dropout's probability, the active adapter.
    Parameters must still be the same tensors with the same values.

    Cost: a look at every attribute of the layer's modules, in forward and in each backward or rebuilding; no sync.
        Quantised weights are dequantised for that time, those of one layer at a time.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.inside = False
        self.modules = [(module, plain_settings(module)) for module in layer.modules()]
        self.parameters = _parameters(layer)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the layer these settings for a while, and plain weights in place of quantised ones.

        Raises:
            TrainingError: its weights are not what they were.
        """
        if self.inside:
            yield
            return
        self._check_weights()
        changed: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module, then in self.modules:
                attributes = vars(module)
                for name, value in then.items():
                    if _differ(attributes.get(name, value), value):
                        changed.append((attributes, name, attributes[name]))
                        attributes[name] = value
            self.inside = True
            trained = [(p, trained) for p, trained, _ in self.parameters if p.requires_grad != trained]
            with _trained(trained), whole_weights(module for module, _ in self.modules):
                yield
        finally:
            self.inside = False
            for attributes, name, value in changed:
                attributes[name] = value

    def _check_weights(self) -> None:
        now = _parameters(self.layer)
        same = len(now) == len(self.parameters) and all(
            p is q and version == later for (p, _, version), (q, _, later) in zip(self.parameters, now, strict=True)
        )
        folded = any(_FOLDED in then and _differ(vars(m)[_FOLDED], then[_FOLDED]) for m, then in self.modules)
        if not same or folded:
            raise TrainingError(
                f"The weights of a {type(self.layer).__name__} were changed or replaced between forward and backward, "
                "so it cannot be run again as it was: step the optimizer, load, merge or add adapters after backward."
            )


def as_then(method: _Method) -> _Method:
    """Make a method of a mixing run its layer as in the forward of `self.run`."""

    @wraps(method)
    def restored(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.run.settings.restored():
            return method(self, *args, **kwargs)

    return restored  # type: ignore[return-value]


@contextmanager
def _trained(changed: list[tuple[Tensor, bool]]) -> Iterator[None]:
    """Switch gradients of parameters on or off for a while."""
    for parameter, trained in changed:
        parameter.requires_grad_(trained)
    try:
        yield
    finally:
        for parameter, trained in changed:
            parameter.requires_grad_(not trained)


def _parameters(layer: nn.Module) -> list[tuple[Tensor, bool, int]]:
    return [(p, p.requires_grad, p._version) for p in layer.parameters()]


def plain_settings(module: nn.Module) -> dict[str, Any]:
    """Return a module's settings: plain values, and public collections of them, copied."""
    found = {}
    for name, value in vars(module).items():
        if _is_plain(value):
            found[name] = value
        elif isinstance(value, list | tuple) and all(map(_is_plain, value)):
            found[name] = type(value)(value) if type(value) in (list, tuple) else value
        elif name[0] != "_" and type(value) is dict and all(map(_is_plain, value.values())):
            found[name] = dict(value)
    return found


def _differ(now: Any, then: Any) -> bool:
    return now is not then and (type(now) is not type(then) or now != then)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)

"""A layer as it was in its forward: run again in backward, it must do the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from types import NoneType
from typing import Any, TypeVar

from torch import Tensor, nn

from longspan.errors import TrainingError
from longspan.stream.quantized import whole_weights

_FOLDED = "merged_adapters"
"""Where layers of PEFT list the adapters that are folded into the weights, which cannot be put back as a name can."""

_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
"""What each module has for torch's own use: parameters and hooks."""

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
        self.modules = [(module, plain_settings(module)) for module in _modules(layer)]
        self.parts = self._parts()
        self.parameters = [
            (p, p.requires_grad, p._version) for m, _ in self.modules for p in m._parameters.values() if p is not None
        ]

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
                    now = attributes.get(name, value)
                    if now is not value and _differ(now, value):
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
        same = self._parts() == self.parts and all(p._version == version for p, _, version in self.parameters)
        folded = any(_FOLDED in then and _differ(vars(m)[_FOLDED], then[_FOLDED]) for m, then in self.modules)
        if not same or folded:
            raise TrainingError(
                f"The weights of a {type(self.layer).__name__} were changed or replaced between forward and backward, "
                "so it cannot be run again as it was: step the optimizer, load, merge or add adapters after backward."
            )

    def _parts(self) -> list[int]:
        """Return which children and parameters the modules have, which live as long as these settings."""
        return [id(part) for m, _ in self.modules for parts in (m._modules, m._parameters) for part in parts.values()]


def as_then(method: _Method) -> _Method:
    """Make a method of a mixing run its layer as in the forward of `self.run`."""

    @wraps(method)
    def restored(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.run.settings.restored():
            return method(self, *args, **kwargs)

    return restored  # type: ignore[return-value]


@contextmanager
def _trained(changed: Sequence[tuple[Tensor, bool]]) -> Iterator[None]:
    """Switch gradients of parameters on or off for a while."""
    for parameter, trained in changed:
        parameter.requires_grad_(trained)
    try:
        yield
    finally:
        for parameter, trained in changed:
            parameter.requires_grad_(not trained)


def _modules(layer: nn.Module) -> list[nn.Module]:
    """Return a module and all in it, each once; `modules()` takes five times as long."""
    found: dict[nn.Module, None] = {}
    waiting = [layer]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in module._modules.values() if child is not None]
    return list(found)


def plain_settings(module: nn.Module) -> dict[str, Any]:
    """Return a module's settings: plain values, and public collections of them, copied."""
    found = {}
    for name, value in vars(module).items():
        if name in _BOOKKEEPING:
            continue
        shape = _shape(type(value))
        if shape == "plain":
            found[name] = value
        elif shape == "list" and all(map(_is_plain, value)):
            found[name] = type(value)(value) if type(value) in (list, tuple) else value
        elif shape == "dict" and name[0] != "_" and all(map(_is_plain, value.values())):
            found[name] = dict(value)
    return found


@cache
def _shape(kind: type) -> str:
    """Tell what values of a type may be: asked of each attribute of each module, so worked out once per type."""
    if issubclass(kind, bool | int | float | str | NoneType):
        return "plain"
    return "list" if issubclass(kind, list | tuple) else "dict" if kind is dict else ""


def _differ(now: Any, then: Any) -> bool:
    return now is not then and (type(now) is not type(then) or now != then)


def _is_plain(value: Any) -> bool:
    return _shape(type(value)) == "plain"

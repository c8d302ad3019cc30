"""The arguments of a decoder layer, and how they are cut into tiles of tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from longspan.attention.call import Window
from longspan.errors import ModelError

_TOKEN_DIMS = {"position_embeddings": -2, "position_ids": -1}
"""Arguments with one entry per token, and the dim that counts them."""

_EMPTY = ("attention_mask", "past_key_values", "past_key_value")
"""Arguments that must be absent: neither a mask nor a cache can be cut into tiles. What stands for a window can."""


@dataclass(frozen=True)
class Arguments:
    """What a layer was called with, besides its hidden states.

    Args:
        context: name of the keyword argument that carries the attention `Call`.
    """

    hidden_name: str
    named: dict[str, Any]
    extra: dict[str, Any]
    context: str

    @classmethod
    def bind(
        cls, name: str, signature: inspect.Signature, context: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Arguments]:
        """Match a layer's arguments to its signature -> hidden states [B, s, d], and the others.

        Raises:
            ModelError: an argument that cannot be divided by tokens, named.
        """
        bound = signature.bind(*args, **kwargs)
        named: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in bound.arguments.items():
            kind = signature.parameters[key].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                extra = dict(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                raise ModelError(f"{name} takes positional arguments without names; it cannot run in tiles.")
            else:
                named[key] = value
        hidden_name = next(iter(signature.parameters))
        hidden = named.pop(hidden_name)
        for key, value in {**named, **extra}.items():
            _refuse(name, key, value, hidden.shape[1])
        return hidden, cls(hidden_name, named, extra, context)

    def tile(self, start: int, stop: int) -> dict[str, Any]:
        """Return the keyword arguments for tokens `start` to `stop`, without hidden states and attention call."""
        both = {**self.named, **self.extra}
        return {key: _cut(key, value, start, stop) for key, value in both.items() if key != self.context}


def _cut(name: str, value: Any, start: int, stop: int) -> Any:
    dim = _TOKEN_DIMS.get(name)
    if dim is None or value is None:
        return value
    if isinstance(value, tuple | list):
        return type(value)(_cut(name, part, start, stop) for part in value)
    return value.narrow(dim, start, stop - start)


def _refuse(layer: str, name: str, value: Any, tokens: int) -> None:
    """Raise for an argument that would be wrong in a tile or lose its gradient."""
    if name in _EMPTY:
        if value is not None and not isinstance(value, Window):
            raise ModelError(f"{layer} is called with {name}, which cannot be divided into tiles.")
        return
    for tensor in pytree.tree_leaves(value):
        if not isinstance(tensor, Tensor):
            continue
        if tensor.requires_grad:
            raise ModelError(f"{layer} is called with {name}, which requires a gradient that tiles would lose.")
        if name not in _TOKEN_DIMS and tokens in tensor.shape and tokens > 1:
            raise ModelError(
                f"{layer} is called with {name} {list(tensor.shape)}, which may have one entry per token and is not "
                "known; it cannot run in tiles."
            )

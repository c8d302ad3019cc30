"""The mask entry of an intercepted attention: no mask is built until attention over whole rows asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from longspan.attention.call import Window
from longspan.integrations.transformers.attention import Refused, mask_stand_in

_NOT_MADE = object()


class Deferred:
    """Stands for a mask: what it would be made of, and what makes it.

    Args:
        make: transformers' own function for the attention's name, or None if there is none.
        asked: its arguments.
    """

    def __init__(self, make: Callable[..., Any] | None, asked: dict[str, Any]) -> None:
        self._make, self._asked = make, asked
        self._made: Any = _NOT_MADE

    @property
    def padding(self) -> Tensor | None:
        """The mask [B, s] that the model was called with: true for tokens, false for padding."""
        return self._asked.get("attention_mask")

    @property
    def stand_in(self) -> Window | Refused | None:
        """What the mask is beyond causal order, documents and padding; None if nothing."""
        return mask_stand_in(**self._asked)

    def mask(self) -> Any:
        """Return the mask itself, made at the first call."""
        if self._made is _NOT_MADE:
            self._made = None if self._make is None else self._make(**self._asked)
        return self._made


class MaskEntry:
    """Stands in for transformers' function that makes masks for an attention's name."""

    def __init__(self, original: Callable[[], Callable[..., Any] | None]) -> None:
        self._original = original

    def __call__(self, **asked: Any) -> Deferred:
        return Deferred(self._original(), asked)

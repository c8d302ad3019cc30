"""Tokens and labels that a model does not know, refused before any rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from longspan.batch import IGNORE_INDEX, LABEL_FIELDS
from longspan.errors import BatchError
from longspan.integrations.transformers.parts import Parts


def check_vocabulary(parts: Parts, batch: Mapping[str, Any]) -> None:
    """Refuse tokens and labels that the model does not know, where reading them costs nothing: while on the host.

    The full batch is read, so all ranks that share it refuse it together. On a GPU an index kernel asserts.

    Raises:
        BatchError: names the token or label, and those that there are.
    """
    known: Any = getattr(parts.embedding, "num_embeddings", None)
    if (wrong := _outside(batch.get("input_ids"), known)) is not None:
        raise BatchError(f"input_ids holds token {wrong}; the model knows 0 to {known - 1}. Is it another tokenizer's?")
    logits: Any = getattr(parts.head, "out_features", None)
    for name in LABEL_FIELDS:
        if (wrong := _outside(batch.get(name), logits, IGNORE_INDEX)) is not None:
            raise BatchError(
                f"{name} holds {wrong}; the model's head has logits 0 to {logits - 1}, and {IGNORE_INDEX} marks tokens "
                "without a target."
            )


def _outside(ids: Any, size: Any, ignored: int | None = None) -> int | None:
    """Return an entry that is neither 0 to size - 1 nor ignored, or None if there is none to be seen."""
    if not isinstance(ids, Tensor) or ids.numel() == 0 or not isinstance(size, int) or ids.device.type != "cpu":
        return None
    if ignored is not None:
        ids = ids.masked_fill(ids == ignored, 0)
    smallest, largest = (int(edge) for edge in ids.aminmax())
    return smallest if smallest < 0 else largest if largest >= size else None

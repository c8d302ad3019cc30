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
        BatchError: names the token or label, its place in the batch, and those that there are.
    """
    known: Any = getattr(parts.embedding, "num_embeddings", None)
    if (found := _outside(batch.get("input_ids"), known)) is not None:
        wrong, place = found
        raise BatchError(
            f"input_ids holds token {wrong}; the model knows 0 to {known - 1} ({place}). Is it another tokenizer's?"
        )
    logits: Any = getattr(parts.head, "out_features", None)
    for name in LABEL_FIELDS:
        if (found := _outside(batch.get(name), logits, IGNORE_INDEX)) is not None:
            wrong, place = found
            raise BatchError(
                f"{name} holds {wrong}; the model's head has logits 0 to {logits - 1}, and {IGNORE_INDEX} marks tokens "
                f"without a target ({place})."
            )


def _outside(ids: Any, size: Any, ignored: int | None = None) -> tuple[int, str] | None:
    """Return an entry that is neither 0 to size - 1 nor ignored, and its place; None if there is none to be seen."""
    if not isinstance(ids, Tensor) or ids.numel() == 0 or not isinstance(size, int) or ids.device.type != "cpu":
        return None
    if ignored is not None:
        ids = ids.masked_fill(ids == ignored, 0)
    smallest, largest = (int(edge) for edge in ids.aminmax())
    if smallest >= 0 and largest < size:
        return None
    wrong = smallest if smallest < 0 else largest
    at = (ids == wrong).nonzero()[0].tolist()
    return wrong, ", ".join(f"{dim} {index}" for dim, index in zip(("row", "token"), at, strict=False))

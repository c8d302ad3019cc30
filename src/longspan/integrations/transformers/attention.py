"""The attention function that prepared models call: it does what the call travelling with the batch says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from longspan.attention.call import Call, Request, autocast
from longspan.batch import CONTEXT
from longspan.errors import ModelError

NAME = "longspan"
"""Our name among the attention implementations; models branch on names that contain flash, sdpa or flex, so it has
none of them."""


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Answer the attention interface of transformers through the `Call` in the keyword arguments."""
    call: Call | None = kwargs.pop(CONTEXT, None)
    scaling = kwargs.pop("scaling", None)
    dropout, causal = kwargs.pop("dropout", 0.0), kwargs.pop("is_causal", None)
    learned = isinstance(scaling, Tensor)
    scale = query.shape[-1] ** -0.5 if scaling is None or learned else float(scaling)
    request = Request(module, autocast(query), autocast(key), autocast(value), scale, kwargs)
    if call is None:
        raise ModelError(
            f"{request.layer} called attention without the context of a sharded batch: this model does not hand "
            "keyword arguments on to its attention, or one of its parts was called by itself. Use handle.shard(batch), "
            "or `with handle.bypass():` for the plain model."
        )
    if learned:
        raise ModelError(f"{request.layer} scales its scores by a tensor, which longspan would not differentiate.")
    if isinstance(attention_mask, _Restricted):
        raise ModelError(
            f"{request.layer} asks attention for {attention_mask.told}, which longspan does not support yet; leaving "
            "it out would change the result."
        )
    if attention_mask is not None:
        raise ModelError(f"{request.layer} passes its own attention mask, which cannot be divided over ranks.")
    if dropout:
        raise ModelError(
            f"{request.layer} uses attention dropout {dropout}; no kernel here replays it: set the config's attention "
            "dropout to 0.0."
        )
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise ModelError(f"{request.layer} is not causal; longspan supports causal attention only.")
    return call.mix(request), None


def register() -> None:
    """Make the function known to transformers under `NAME`. It holds no state: each call brings its own."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)


@dataclass(frozen=True)
class _Restricted:
    """Stands for a mask that is more than causal order and documents; a layer that uses it is refused."""

    told: str


def _no_mask(*, local_size: int | None = None, use_vmap: bool = False, **kwargs: Any) -> _Restricted | None:
    """Build no mask: borders and padding travel in the batch's own context.

    Models make the masks of all their kinds of layers, used or not, and some say nowhere else that a layer sees a
    window, so what is more than causal is marked for the layers that get it.

    Args:
        local_size: tokens of a sliding window or chunk.
        use_vmap: whether the model changes the mask by a function of its own.
    """
    if local_size is not None:
        return _Restricted(f"a window or chunks of {local_size} tokens")
    return _Restricted("a mask of its own making") if use_vmap else None

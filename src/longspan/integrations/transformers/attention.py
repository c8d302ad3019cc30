"""The attention function that prepared models call: it does what the call travelling with the batch says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from longspan.attention.call import Call, Request, Window, autocast
from longspan.batch import CONTEXT
from longspan.errors import ModelError
from longspan.kernels.protocol import Score

NAME = "longspan"
"""Our name among the attention implementations; models branch on names that contain flash, sdpa or flex, so it has
none of them."""


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Answer the attention interface of transformers through the `Call` in the keyword arguments."""
    call: Call | None = kwargs.pop(CONTEXT, None)
    request = request_of(module, query, key, value, kwargs)
    if call is None:
        raise ModelError(
            f"{request.layer} called attention without the context of a sharded batch: this model does not hand "
            "keyword arguments on to its attention, or one of its parts was called by itself. Use handle.shard(batch), "
            "or `with handle.bypass():` for the plain model."
        )
    return call.mix(masked(request, attention_mask)), None


def request_of(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Request:
    """Sort a layer's keyword arguments into what is understood and what is not.

    Args:
        kwargs: those of the attention interface; what is understood is taken out of them.

    Raises:
        ModelError: an argument that is understood, and cannot be served.
    """
    layer = Request(module, q, k, v, Score(1.0)).layer
    scaling, softcap = kwargs.pop("scaling", None), kwargs.pop("softcap", None)
    window, sinks = kwargs.pop("sliding_window", None), kwargs.pop("s_aux", None)
    dropout, causal = kwargs.pop("dropout", 0.0), kwargs.pop("is_causal", None)
    if isinstance(scaling, Tensor):
        raise ModelError(f"{layer} scales its scores by a tensor, which longspan would not differentiate.")
    if dropout:
        raise ModelError(
            f"{layer} uses attention dropout {dropout}; no kernel here replays it: set the config's attention "
            "dropout to 0.0."
        )
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise ModelError(f"{layer} is not causal; longspan supports causal attention only.")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ModelError(f"{layer} asks for sliding_window={window!r}; a window is a whole number of tokens from 1 on.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ModelError(f"{layer} has s_aux {list(sinks.shape)}, not one sink for each of its {q.shape[1]} heads.")
    score = Score(q.shape[-1] ** -0.5 if scaling is None else float(scaling), float(softcap) if softcap else None)
    return Request(module, autocast(q), autocast(k), autocast(v), score, kwargs, window, sinks)


def masked(request: Request, mask: Any) -> Request:
    """Return a request with the window that the layer's mask has.

    Some layers say themselves what window they have, others leave it to their mask. Attention functions of transformers
    go by one or the other, so the two must agree.

    Args:
        mask: what the model was given for a mask by `mask_stand_in`.

    Raises:
        ModelError: they do not, or the mask is something else.
    """
    if isinstance(mask, Refused):
        raise ModelError(
            f"{request.layer} asks attention for {mask.told}, which longspan does not support yet; leaving it out "
            "would change the result."
        )
    if mask is not None and not isinstance(mask, Window):
        raise ModelError(f"{request.layer} passes its own attention mask, which cannot be divided over ranks.")
    window = None if mask is None else mask.tokens
    if request.window is not None and request.window != window:
        shown = "sees all tokens" if window is None else f"has a window of {window} tokens"
        raise ModelError(
            f"{request.layer} asks attention for sliding_window={request.window}, but its mask {shown}; which of them "
            "is meant depends on the attention function, so longspan cannot tell."
        )
    return replace(request, window=window)


def register() -> None:
    """Make the function known to transformers under `NAME`. It holds no state: each call brings its own."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_stand_in)


@dataclass(frozen=True)
class Refused:
    """Stands for a mask that longspan cannot serve; a layer that uses it is refused."""

    told: str


def mask_stand_in(
    *, local_size: int | None = None, use_vmap: bool = False, config: Any = None, **kwargs: Any
) -> Window | Refused | None:
    """Return what stands for a mask, of which none is built: borders and padding are known from elsewhere.

    Models make the masks of all their kinds of layers, used or not, and some say nowhere else that a layer sees a
    window, so what is more than causal is marked for the layers that get it.

    Args:
        local_size: tokens of a sliding window or chunk.
        use_vmap: whether the model changes the mask by a function of its own.
        config: the model's; its settings tell windows from chunks.
    """
    if use_vmap:
        return Refused("a mask of its own making")
    if local_size is None:
        return None
    if getattr(config, "attention_chunk_size", None) == local_size:
        return Refused(f"chunks of {local_size} tokens that do not see each other")
    if getattr(config, "sliding_window", None) == local_size:
        return Window(local_size)
    return Refused(f"a window or chunks of {local_size} tokens")

"""Stand in for one of transformers' attention functions, for every model that uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longspan.attention.build import Attend
from longspan.attention.call import Request
from longspan.attention.schedule import Schedule
from longspan.engines.mpu import MPU
from longspan.errors import BatchError, ModelError
from longspan.integrations.deepspeed.contexts import Contexts
from longspan.integrations.deepspeed.losses import Losses
from longspan.integrations.deepspeed.masks import Deferred, MaskEntry
from longspan.integrations.transformers.attention import masked, request_of
from longspan.kernels.protocol import Kernel
from longspan.kernels.protocol import Request as KernelRequest
from longspan.kernels.select import pick

_REFUSED = ("sinks", "position_bias", "alibi", "head_mask", "indices")
"""Arguments by which layers of transformers' models change what attention computes; others are only handed through."""

_DIVISIBLE_LAYERS = frozenset({"full_attention", "attention", "moe", "mlp", "dense", "sparse"})
"""Types of layers, as configs of transformers name them, whose tokens meet in plain attention alone."""

_LENGTH_ROPES = frozenset({"dynamic", "longrope"})
"""Rotary embeddings that choose their frequencies by the largest position they are shown."""


@dataclass(eq=False)
class Registration:
    """What was asked for the models of one config.

    Args:
        identity: what tells its config from others.
        settings: what was asked, to tell a repeated call from another one.
        kernel: name under which a kernel is picked.
    """

    identity: tuple[Any, ...]
    settings: tuple[Any, ...]
    mpu: MPU
    kernel: str
    contexts: Contexts
    disable_in_eval: bool
    kernels: dict[KernelRequest, Kernel] = field(default_factory=dict)

    def kernel_for(self, request: Request) -> Kernel:
        """Return the kernel that serves a layer's call, picked once."""
        kind, packed = request.kind, self.kernel in ("auto", "sdpa")
        demands = {"varlen": packed, "window": kind.window, "softcap": kind.softcap}
        wanted = KernelRequest(request.q.device, request.q.dtype, kind.head_dim, kind.v_head_dim, **demands)
        if wanted not in self.kernels:
            self.kernels[wanted] = pick(self.kernel, wanted)
        return self.kernels[wanted]


class Interception:
    """Stands in for the attention function of one name, until it is lifted; its mask entry goes with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.registrations: list[Registration] = []
        self.losses = Losses()
        self._known: WeakSet[nn.Module] = WeakSet()  # layers whose models were looked at
        self._own: dict[Any, Any] = {}
        for interface, entry in (
            (ALL_ATTENTION_FUNCTIONS, self),
            (ALL_MASK_ATTENTION_FUNCTIONS, MaskEntry(lambda: self._original(ALL_MASK_ATTENTION_FUNCTIONS))),
        ):
            self._own[id(interface)] = interface._local_mapping.get(name)
            interface[name] = entry

    def lift(self) -> None:
        """Give transformers its own attention and mask functions back, and models their losses."""
        for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            own = self._own[id(interface)]
            if own is None:
                interface._local_mapping.pop(self.name, None)
            else:
                interface[self.name] = own
        self.losses.restore()

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Answer transformers' attention interface for this rank's part of the tokens."""
        registration = self._registration(module)
        if registration.disable_in_eval and not module.training:
            return self._plain(module, query, key, value, attention_mask, kwargs)
        request, padding = _checked(request_of(module, query, key, value, kwargs), attention_mask)
        schedule = self._schedule(registration, request, padding)
        attend = Attend(registration.mpu.mesh, registration.kernel_for(request))
        return attend(*request.operands(), schedule, request.score, request.sinks), None

    def _schedule(self, registration: Registration, request: Request, padding: Tensor | None) -> Schedule:
        positions = request.extra.get("position_ids")
        tokens = request.q.shape[2]
        if not isinstance(positions, Tensor):
            raise BatchError(
                f"{request.layer} called attention without position_ids, by which documents and the places of tokens "
                "are known: pass the position_ids of UlyssesSPDataLoaderAdapter to the model."
            )
        if request.module not in self._known:
            _check_config(getattr(request.module, "config", None), request.layer)
            self.losses.guard_caller()
            self._known.add(request.module)
        return registration.contexts.schedule(positions, padding, tokens, request.window)

    def _registration(self, module: nn.Module) -> Registration:
        """Find what was asked for the model that a layer belongs to."""
        if len(self.registrations) == 1:
            return self.registrations[0]
        identity = identity_of(getattr(module, "config", None))
        for registration in self.registrations:
            if registration.identity == identity:
                return registration
        raise ModelError(
            f"{len(self.registrations)} configs are registered for '{self.name}', none of them that of this "
            f"{type(module).__name__} ({', '.join(map(str, identity))}): register its model too."
        )

    def _plain(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        original = self._original(ALL_ATTENTION_FUNCTIONS)
        if original is None:
            raise ModelError(f"transformers has no attention function '{self.name}' to run in eval.")
        mask = mask.mask() if isinstance(mask, Deferred) else mask
        return original(module, query, key, value, mask, **kwargs)

    def _original(self, interface: Any) -> Callable[..., Any] | None:
        """Return what transformers itself has under this name; kernels of the Hub come when a model is loaded."""
        return self._own[id(interface)] or type(interface)._global_mapping.get(self.name)


def interceptions() -> list[Interception]:
    """Return those that are in place."""
    return [entry for entry in ALL_ATTENTION_FUNCTIONS._local_mapping.values() if isinstance(entry, Interception)]


def identity_of(config: Any) -> tuple[Any, ...]:
    """Return what tells the text model of a config from other ones: its kind and its sizes."""
    if config is None:
        return ()
    text = config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return (text.model_type, *(getattr(text, name, None) for name in names))


def _checked(request: Request, mask: Any) -> tuple[Request, Tensor | None]:
    """Refuse calls that would not be exact -> the call with its window, and which of this rank's tokens are real, if
    the model was told."""
    for name in _REFUSED:
        if request.extra.get(name) is not None:
            raise ModelError(
                f"{request.layer} asks attention for {name}, which longspan does not support yet; leaving it out would "
                "change the result."
            )
    if request.q.shape[2] != request.k.shape[2]:
        raise BatchError(
            f"{request.layer} attends from {request.q.shape[2]} tokens to {request.k.shape[2]}: a KV cache cannot be "
            "used with divided rows. Generate after UlyssesSPAttentionHF.unregister(), or in eval with "
            "disable_in_eval=True."
        )
    if mask is not None and not isinstance(mask, Deferred):
        raise BatchError(
            f"{request.layer} was given a mask per pair of tokens, which cannot be divided over ranks: describe "
            "documents by position_ids that restart."
        )
    if mask is None:
        return masked(request, None), None
    return masked(request, mask.stand_in), mask.padding


def _check_config(config: Any, layer: str) -> None:
    """Refuse models whose tokens meet outside of attention, or whose positions depend on the rows' length."""
    if config is None:
        return
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ():
        # layers with a window are refused when they attend: some have one that is off
        if kind not in _DIVISIBLE_LAYERS and not kind.endswith(("sliding_attention", "chunked_attention")):
            raise ModelError(
                f"The model of {layer} has layers of type '{kind}', which would see this rank's tokens alone; longspan "
                "divides attention only."
            )
    ropes: Any = getattr(text, "rope_parameters", None) or {}
    kinds = [ropes] if "rope_type" in ropes else [rope for rope in ropes.values() if isinstance(rope, dict)]
    for rope in kinds:
        if rope.get("rope_type") in _LENGTH_ROPES:
            raise ModelError(
                f"The model of {layer} has rotary embeddings of type '{rope['rope_type']}', which every rank would "
                "choose by its own part of a row; use longspan.prepare, which shows each the whole row's length."
            )

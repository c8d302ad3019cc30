"""Token mixers other than attention that are understood: the gated delta nets of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from longspan.attention.call import Call
from longspan.batch import CONTEXT
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Axis
from longspan.recurrent.build import Recurrent, Share
from longspan.recurrent.call import DeltaNet, Recurrence
from longspan.recurrent.rule import ChunkedRule

_TOKENS = 5

Projected = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k [B, S, K, Dk], v, z [B, S, V, Dv], b, a [B, S, V]: what a net makes of its hidden states."""


def _fused(module: Any, x: Tensor) -> Projected:
    """Project as Qwen3-Next does, with the weights of each key head side by side."""
    return module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))


def _apart(module: Any, x: Tensor) -> Projected:
    """Project as Qwen3.5 does, with q, k and v in one product."""
    q, k, v = module.in_proj_qkv(x).split([module.key_dim, module.key_dim, module.value_dim], -1)
    q, k = (t.unflatten(-1, (-1, module.head_k_dim)) for t in (q, k))
    v, z = (t.unflatten(-1, (-1, module.head_v_dim)) for t in (v, module.in_proj_z(x)))
    return q, k, v, z, module.in_proj_b(x), module.in_proj_a(x)


_PROJECTIONS: dict[str, Callable[[Any, Tensor], Projected]] = {
    "Qwen3NextGatedDeltaNet": _fused,
    "Qwen3_5GatedDeltaNet": _apart,
    "Qwen3_5MoeGatedDeltaNet": _apart,
}
"""How each class of transformers projects its hidden states. Source: transformers 5.17 to 5.24."""


def mixer_forwards(layers: Iterable[nn.Module]) -> list[tuple[nn.Module, MixerForward]]:
    """Return what stands in for the `forward` of each understood mixer of some layers."""
    nets = [(mixer_of(layer), net_of(layer)) for layer in layers]
    return [(module, MixerForward(module, net)) for module, net in nets if module is not None and net is not None]


def mixer_of(layer: nn.Module) -> nn.Module | None:
    """Return the mixer of a decoder layer, if it has an understood one."""
    return next((module for module in layer.modules() if type(module).__name__ in _PROJECTIONS), None)


def net_of(layer: nn.Module) -> DeltaNet | None:
    """Describe the mixer of a decoder layer, if it has an understood one."""
    module: Any = mixer_of(layer)
    if module is None:
        return None
    return DeltaNet(
        module.num_k_heads,
        module.num_v_heads // module.num_k_heads,
        module.head_k_dim,
        module.head_v_dim,
        module.conv_kernel_size,
        ACT2FN[module.activation],
    )


class _Alone:
    """Answers a mixer that has all tokens of one document."""

    def mix(self, request: Any) -> Tensor:
        """Convolve and recur on this process."""
        tokens = request.tokens.shape[1]
        share = Share.of(
            Mask(tokens), 1, Layout(tokens), Axis(), request.net.heads, request.net.width - 1, request.tokens.device
        )
        return Recurrent(ChunkedRule())(request, share)


def check_mixer(forward: MixerForward) -> None:
    """Compare what stands in for a mixer's forward with its own, on a few tokens.

    Raises:
        ModelError: they differ, or its own cannot be run.
    """
    module: Any = forward.module
    x = torch.randn(1, _TOKENS, module.hidden_size, generator=torch.Generator().manual_seed(11))
    half = module.A_log.is_cuda and module.A_log.dtype == torch.float32  # kernels for GPUs compute in bf16
    x = x.to(module.A_log)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        try:
            wanted = forward.original(x)
        except Exception as error:
            raise ModelError(f"{forward.name} cannot be run by itself ({type(error).__name__}: {error}).") from error
        found = forward(x, **{CONTEXT: _Alone()})
    if float((wanted - found).abs().max()) > close(wanted.dtype) * float(wanted.abs().max()):
        raise ModelError(
            f"{forward.name} does not compute what the gated delta net of transformers 5.17 to 5.24 does; longspan "
            "does not know this version of it."
        )


def close(dtype: torch.dtype) -> float:
    """Return how far results in a dtype may be apart, relative to the largest, if they are made in different ways."""
    return 1e-4 if torch.finfo(dtype).bits > 16 else 2**-5


class MixerForward:
    """Stands in for the `forward` of a gated delta net: its own modules around a mixing that the call answers.

    Projections, gated norm and output projection are called as modules, so that their adapters and hooks stay in force;
    the convolution, `A_log` and `dt_bias` are read as weights.
    """

    def __init__(self, module: nn.Module, net: DeltaNet) -> None:
        self.module, self.net = module, net
        self.original = module.forward
        self.name = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
        functools.update_wrapper(self, self.original)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call: Call | None = kwargs.get(CONTEXT)
        if call is None:
            return self.original(hidden_states, *args, **kwargs)
        given = [key for key in ("cache", "cache_params", "attention_mask") if kwargs.get(key) is not None]
        if args or given:
            raise ModelError(
                f"{self.name} was given {' and '.join(given) or 'arguments without names'}, which cannot be divided "
                "over ranks."
            )
        module: Any = self.module
        q, k, v, z, b, a = _PROJECTIONS[type(module).__name__](module, hidden_states)
        net = self.net
        grouped = (t.unflatten(2, (net.heads, net.share)) for t in (v, b, a))
        v, b, a = (t.flatten(3) for t in grouped)
        tokens = torch.cat([q, k, v, b, a], -1)
        out = call.mix(Recurrence(net, tokens, self._weights()))
        out = module.norm(out.reshape(-1, net.v_head_dim), z.reshape(-1, net.v_head_dim))
        return module.out_proj(out.view(*hidden_states.shape[:2], -1))

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights that are read, sorted by key head.

        Raises:
            ModelError: the convolution is more than an nn.Conv1d: its weight alone does not say what it does.
        """
        module, net = cast(Any, self.module), self.net
        if type(module.conv1d) is not nn.Conv1d:
            raise ModelError(
                f"conv1d of {self.name} is {type(module.conv1d).__name__}, of which only the weight would be used; "
                "leave conv1d out of an adapter's target_modules."
            )
        width = net.heads * net.head_dim
        q, k, v = module.conv1d.weight.squeeze(1).split([width, width, net.heads * net.share * net.v_head_dim])
        conv = torch.cat([t.unflatten(0, (net.heads, -1)) for t in (q, k, v)], 1)
        a_log, dt_bias = (t.unflatten(0, (net.heads, net.share)) for t in (module.A_log, module.dt_bias))
        return conv, a_log, dt_bias

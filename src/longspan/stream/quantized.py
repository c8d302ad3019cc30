"""Linear layers with quantised weights, dequantised once for all tiles of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.overrides import Overrides

Linear = Callable[[Tensor], Tensor]


@contextmanager
def whole_weights(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Linear]]:
    """Let quantised linear layers have plain weights for a while.

    A layer that runs tile by tile would otherwise dequantise each weight once per tile. The plain weight takes the
    place of the parameter, so that compiled code, which is traced once for many layers, is given it as an input.

    Returns:
        For modules whose own forward reads quantised weights only: what to call in its place.

    Raises:
        ModelError: a weight in a form that is for inference alone.

    Cost: memory of these modules' weights, in the type they compute in.
    """
    forwards, held = Overrides(), []
    instead: dict[nn.Module, Linear] = {}
    try:
        for module in modules:
            weight = whole_weight(module)
            if weight is None:
                continue
            held.append((module, module._parameters["weight"]))
            module._parameters["weight"] = _WholeParameter(weight, requires_grad=False)
            if _is_bnb(module) and isinstance(module, nn.Linear):
                instead[module] = _PlainLinear(module)
                forwards.set(module, forward=instead[module])
        yield instead
    finally:
        forwards.restore()
        for module, weight in held:
            module._parameters["weight"] = weight


def quantised(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer whose quantised weight stands for plain numbers.

    Weights that bring their own rule for quantising activations do not: their product is another than the plain one.
    """
    weight = module._parameters.get("weight")
    if weight is None or not isinstance(module, nn.Linear):
        return False
    if _is_bnb(module):
        return _state(module) is not None and not isinstance(weight, _WholeParameter)
    kind = type(weight)
    own = kind.__module__.startswith("torchao.") and getattr(weight, "act_quant_kwargs", None) is None
    return own and kind.__name__ not in _WITH_ACTIVATIONS


def whole_weight(module: nn.Module) -> Tensor | None:
    """Return the plain weight [out, in] of a quantised linear layer, in the type it computes in; None for others."""
    if not quantised(module):
        return None
    weight: Any = module._parameters["weight"]
    with torch.no_grad():
        if not _is_bnb(module):
            original = getattr(weight, "get_original_weight", None)
            return (weight.dequantize() if original is None else original()).detach()
        from bitsandbytes.functional import dequantize_4bit  # pyright: ignore[reportMissingImports]

        state = _state(module)
        if getattr(state, "packing_format_for_cpu", False):
            raise ModelError(
                "A 4-bit weight was repacked by bitsandbytes for inference on CPUs, where it cannot be trained on: set "
                "support_avx512bf16_for_cpu = False on its Linear4bit modules before the model runs in eval()."
            )
        whole = dequantize_4bit(weight.data, state)
        return whole.to(getattr(module, "compute_dtype", None) or whole.dtype)


def packed_size(module: nn.Module) -> tuple[int, int]:
    """Return how many numbers a module's packed weight stands for, and its bytes with all scales; (0, 0) for others."""
    if not quantised(module):
        return 0, 0
    weight: Any = module._parameters["weight"]
    if not _is_bnb(module):
        return weight.numel(), _bytes(weight)
    state = _state(module)
    scales = [state.absmax, *([] if state.state2 is None else [state.state2.absmax])]
    return state.shape.numel(), sum(t.numel() * t.element_size() for t in (weight, *scales))


def _bytes(tensor: Any) -> int:
    """Return the bytes of a tensor that may be made of several."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def mixes_tokens(module: nn.Module) -> str | None:
    """Return why a linear layer's result for one token depends on the others beside it; None if it does not.

    Such a layer gives other numbers for a part of a sequence, and others again for a tile of it.
    """
    kind, weight = type(module), module._parameters.get("weight")
    if kind.__name__ == "Float8Linear":
        config: Any = getattr(module, "config", None)
        casts = ("cast_config_input", "cast_config_grad_output")
        if config is None or any("TENSORWISE" in str(getattr(config, cast).scaling_granularity) for cast in casts):
            return "one float8 scale for all tokens (per-tensor scaling)"
        gradient = getattr(config, "cast_config_input_for_grad_weight", None)
        disabled = "DISABLED" in str(getattr(gradient, "scaling_type", "DISABLED"))
        if weight is not None and weight.requires_grad and not disabled:
            return "float8 scales over the tokens in the gradient of its weight"
    activations = getattr(weight, "act_quant_kwargs", None)
    if activations is not None and "PerTensor" in str(getattr(activations, "granularity", "")):
        return "one scale for the activations of all tokens (per-tensor scaling)"
    if kind.__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0.0) > 0:
        return "outlier columns chosen by all tokens (LLM.int8 with a threshold)"
    return None


class _WholeParameter(nn.Parameter):
    """Tells a weight that is plain for a while from a packed one."""


class _PlainLinear:
    """The forward of a bitsandbytes layer while its weight is plain, in the weight's type; later on its own forward."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if weight.shape != (self.module.out_features, self.module.in_features):  # packed again
            return type(self.module).forward(self.module, x)
        out = F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
        return out.to(x.dtype)


_WITH_ACTIVATIONS = ("LinearActivationQuantizedTensor", "WeightTensorWithLinearActivationQuantizationMetadata")


def _is_bnb(module: nn.Module) -> bool:
    return any(kind.__name__ == "Linear4bit" for kind in type(module).__mro__)


def _state(module: nn.Module) -> Any:
    """Return how a bitsandbytes weight was quantised; engines that shard keep it on the module alone."""
    return getattr(module._parameters["weight"], "quant_state", None) or getattr(module, "quant_state", None)

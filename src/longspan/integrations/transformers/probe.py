"""Find out, on a few tokens, whether a model is what sequence parallelism needs: token-wise but for its attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from longspan.attention.call import Kind, Request
from longspan.batch import CONTEXT
from longspan.errors import LongspanError, ModelError
from longspan.integrations.transformers.lending import lending, lent
from longspan.integrations.transformers.logits import logit_options, trial_logits
from longspan.integrations.transformers.mixers import check_mixer, close, mixer_forwards
from longspan.integrations.transformers.parts import Parts
from longspan.integrations.transformers.routers import ROUTER_LOGITS
from longspan.kernels.protocol import Score
from longspan.loss import LossOptions
from longspan.overrides import Overrides
from longspan.recurrent.call import Recurrence

_TOKENS = 5
_ROW = 2  # has neighbours on both sides, so that mixing in either direction shows
_PART = 2  # where the tokens start that are also run by themselves


@dataclass(frozen=True)
class Shape:
    """Operands of a layer's attention call, or of its recurrent mixer, and what else it asks for."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    score: Score
    window: int | None = None
    sinks: bool = False
    recurrent: bool = False

    @property
    def kind(self) -> Kind:
        """What its kernel is picked by."""
        return Kind(self.head_dim, self.v_head_dim, self.window is not None, self.score.softcap is not None)


@dataclass(frozen=True)
class Probed:
    """What a few tokens have shown: each layer's attention call, and what becomes of the head's output."""

    shapes: list[Shape]
    logits: LossOptions


@dataclass
class ProbeCall:
    """Stands in for mixers: records their calls and returns a fixed random output, in `moved` changed at one row."""

    moved: bool = False
    requests: list[Request | Recurrence] = field(default_factory=list)

    def mix(self, request: Request | Recurrence) -> Tensor:
        """Answer with an output that depends on nothing but its shape."""
        if isinstance(request, Request):
            request.refuse_unknown(frozenset())
        self.requests.append(request)
        shape, like = _shape(request), request.operands()[0]
        noise = torch.Generator().manual_seed(17)
        out = torch.randn(*like.shape[:2], shape.heads, shape.v_head_dim, generator=noise)
        if self.moved:
            out[:, _ROW] += 1.0
        return out.to(like.device, like.dtype)


def probe(parts: Parts) -> Probed:
    """Run the model on a few tokens and check every decoder layer.

    A layer passes if it calls attention, or a recurrent mixer that is understood, once with its own operands, and if
    neither another token nor another token's output of that call moves a row of its output. Such a mixer passes if it
    computes what its own forward does. The head passes if the model returns its output as logits, or scaled and capped
    as its config says, and what comes before the layers if the last tokens, run by themselves, enter the first layer as
    they do in company. A model without weights is given random ones meanwhile, the same on every process.

    Raises:
        ModelError: names the layer and what it does.

    Cost: five forward passes of each layer on 5 tokens, and three more in fp32 where experts round by their company.
    """
    seen: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda m, a, kw, i=i: seen.setdefault(i, (a, dict(kw))), with_kwargs=True)
        for i, layer in enumerate(parts.layers)
    ]
    replaced = Overrides()
    mixers = mixer_forwards(parts.layers)
    try:
        with torch.no_grad(), _evaluating(parts.model), lending(parts):
            for module, forward in mixers:
                with lent(module.modules(), parts.device):
                    check_mixer(forward)
                replaced.set(module, forward=forward)
            whole, logits = _run_model(parts, 0)
            for hook in hooks:
                hook.remove()
            shapes = []
            for i, layer in enumerate(parts.layers):
                name = f"{parts.layers_name}.{i} ({type(layer).__name__})"
                if i not in seen:
                    raise ModelError(f"{name} was not called in a forward pass.")
                shapes.append(_check_layer(name, layer, *seen.pop(i)))
            _check_part(parts, whole[0], _run_model(parts, _PART)[0][0])
    finally:
        replaced.restore()
        for hook in hooks:
            hook.remove()
    return Probed(shapes, logits)


def _run_model(parts: Parts, first: int) -> tuple[list[Request | Recurrence], LossOptions]:
    """Run the model on the tokens from `first` with a stand-in for attention and for the head's output."""
    model, head, embedding = parts.model, parts.head, cast(Any, parts.embedding)
    device, size = parts.device, embedding.weight.shape[0]
    ids = torch.randint(size, (1, _TOKENS), generator=torch.Generator().manual_seed(3))[:, first:].to(device)
    logits: list[Tensor] = []
    call = ProbeCall()

    def replace(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        logits.append(trial_logits(model.config.get_text_config(), out.shape, seed=len(logits)).to(out))
        return logits[-1]

    hook = head.register_forward_hook(replace)
    try:
        positions = torch.arange(first, _TOKENS, device=device)[None]
        asked = {ROUTER_LOGITS: False} if getattr(model.config, ROUTER_LOGITS, False) else {}
        out = model(input_ids=ids, position_ids=positions, use_cache=False, **asked, **{CONTEXT: call})
    except (LongspanError, NotImplementedError):
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot run on {ids.shape[1]} tokens ({type(error).__name__}: {error}), "
            "so longspan cannot tell whether it is exact for it."
        ) from error
    finally:
        hook.remove()
    if len(logits) != 1 or logits[0].shape[:2] != ids.shape:
        raise ModelError(f"{type(model).__name__} does not call its output head once on all tokens.")
    return call.requests, logit_options(type(model).__name__, model.config.get_text_config(), logits[0], out.logits)


def _check_part(parts: Parts, whole: Request | Recurrence, part: Request | Recurrence) -> None:
    """Refuse a model that counts positions by itself, or mixes tokens before its first layer."""
    for (what, wanted), (_, found) in zip(_by_token(whole), _by_token(part), strict=True):
        wanted, tolerance = wanted[:, _PART:], close(found.dtype)  # roundings depend on the number of rows
        if float((wanted - found).abs().max()) > tolerance * float(wanted.abs().max()):
            raise ModelError(
                f"{type(parts.model).__name__} makes other {what} in its first layer when tokens are run without those "
                "before them: it does not go by their position_ids, or mixes tokens before its layers. A part of a "
                "sequence would be computed wrongly."
            )


def _check_layer(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shape:
    """Check one layer in its own dtype, and where rounding depends on its company (experts) once more in fp32."""
    try:
        return _check_rows(name, layer, args, kwargs, tolerance=0.0)
    except ModelError:
        if not any("expert" in n for n, _ in layer.named_modules()):
            raise
    args, kwargs = _cast(args), _cast(kwargs)
    return _check_rows(name, copy.deepcopy(layer).float(), args, kwargs, tolerance=1e-5)


def _by_token(request: Request | Recurrence) -> list[tuple[str, Tensor]]:
    """Return what a call is given of each token, [B, S, ...], with names."""
    operands = request.operands()
    return list(zip("qkv", operands, strict=True)) if isinstance(request, Request) else [("operands", operands[0])]


def _check_rows(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float) -> Shape:
    rest = {key: value for key, value in kwargs.items() if key != CONTEXT}
    x, args, rest = _hidden(name, args, rest)
    sizes = {key: len(value) for key, value in rest.items() if isinstance(value, dict | list)}

    def run(x: Tensor, moved: bool = False) -> tuple[Tensor, list[Request | Recurrence]]:
        call = ProbeCall(moved)
        try:
            out = layer(x, *args, **rest, **{CONTEXT: call})
        except (LongspanError, NotImplementedError):
            raise
        except Exception as error:
            raise ModelError(f"{name} cannot be run by itself ({type(error).__name__}: {error}).") from error
        return (out[0] if isinstance(out, tuple) else out), call.requests

    noise = torch.randn(x[:, _ROW].shape, generator=torch.Generator().manual_seed(5)).to(x)
    other = x.clone()
    other[:, _ROW] = noise * x.float().std().to(x.dtype)
    (out, calls), (out_x, calls_x), (out_o, _) = run(x), run(other), run(x, moved=True)
    if {key: len(value) for key, value in rest.items() if isinstance(value, dict | list)} != sizes:
        raise ModelError(f"{name} writes into its keyword arguments; such a state is not carried over ranks.")
    if len(calls) != 1:
        often = "never calls the attention interface" if not calls else f"calls attention {len(calls)} times"
        raise ModelError(
            f"{name} {often}; longspan supports layers with one attention call, or with the gated delta net of "
            "Qwen3-Next or Qwen3.5 in its place."
        )
    for what, a, b in (("another token", out, out_x), ("another token's attention output", out, out_o)):
        moved = _moved(a, b, tolerance)
        if moved - {_ROW}:
            raise ModelError(f"{name} mixes tokens outside its attention: {what} moved the output of a token.")
        if _ROW not in moved:
            raise ModelError(f"{name} does not use what it is given: {what.removeprefix('another ')} moved nothing.")
    for (what, before), (_, after) in zip(_by_token(calls[0]), _by_token(calls_x[0]), strict=True):
        moved = _moved(before, after, tolerance)
        if moved - {_ROW} or (what != "q" and _ROW not in moved):
            raise ModelError(f"{name} does not make its attention's {what} from its own tokens alone.")
    return _shape(calls[0])


def _hidden(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[:2] != (1, _TOKENS):
        shape = f", but with {list(x.shape)}" if isinstance(x, Tensor) else ""
        raise ModelError(f"{name} is not called with hidden states [B, S, d] as its first argument{shape}.")
    return x, args[1:], {k: v for k, v in kwargs.items() if args or k != "hidden_states"}


def _shape(request: Request | Recurrence) -> Shape:
    if isinstance(request, Recurrence):
        net = request.net
        heads = net.heads * net.share
        return Shape(heads, net.heads, net.head_dim, net.v_head_dim, request.tokens.dtype, Score(1.0), recurrent=True)
    q, k, v = request.q, request.k, request.v
    sizes = (q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], q.dtype)
    return Shape(*sizes, request.score, request.window, request.sinks is not None)


def _moved(a: Tensor, b: Tensor, tolerance: float) -> set[int]:
    """Return the tokens at which two tensors [1, S, ...] differ."""
    far = (a - b).abs() > tolerance * a.abs().max()
    return set(far.transpose(0, 1).flatten(1).any(1).nonzero().flatten().tolist())


def _cast(value: Any) -> Any:
    """Turn the floating tensors of (nested) arguments into fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(_cast(v) for v in value)
    return {k: _cast(v) for k, v in value.items()} if isinstance(value, dict) else value


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

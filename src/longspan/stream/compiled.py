"""The halves of a layer compiled, forward and backward, each graph holding only what its results need."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from longspan.attention.call import Request
from longspan.errors import ModelError
from longspan.kernels.protocol import wide
from longspan.recurrent.call import DeltaNet, Recurrence
from longspan.stream.calls import Answer
from longspan.stream.graph import DifferentiableHalves
from longspan.stream.halves import ROUTING, Halves
from longspan.stream.joint import Joint, divide, writes
from longspan.stream.routing import Choices, Routing
from longspan.stream.settings import plain_settings

Graph = Callable[..., Any]


@dataclass
class Compiler:
    """Compiled graphs of layers, one per kind of layer, half and shape.

    A half is traced with its derivative, so that what the derivative does not need is not computed: no product whose
    value nobody uses (the last one of the MLP, or k and v where they are kept) is recomputed in backward.

    Args:
        backend: a backend of torch.compile.
    """

    backend: str
    graphs: dict[Any, tuple[Graph, Any]] = field(default_factory=dict)
    joints: dict[Any, Joint | None] = field(default_factory=dict)

    @cached_property
    def differentiable(self) -> DifferentiableHalves:
        """Halves for layers that keep their activations."""
        return DifferentiableHalves(self.backend)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        return Compiler(self.backend)

    def graph(
        self, key: Any, function: Callable[..., Any], tensors: Sequence[Tensor], form: list[Any]
    ) -> tuple[Graph, Any]:
        """Return the compiled function of these tensors, tracing it at its first use, and the mixer's form.

        Args:
            form: where tracing leaves what is no tensor of the mixer's call, if it meets that.
        """
        if key not in self.graphs:
            compiled = self._compiled(_traced(function, tensors))
            self.graphs[key] = compiled, form[0] if form else None
        return self.graphs[key]

    def joint(
        self, function: Callable[..., Any], tensors: Sequence[Tensor], results: int, tangents: range
    ) -> Joint | None:
        """Compile a function and its derivative apart, see `joint.divide`; None if it cannot be divided."""
        traced = _traced(function, tensors)
        if writes(traced):
            return None
        forward, backward = divide(traced, results, tangents)
        return Joint(self._compiled(forward), self._compiled(backward), results)

    def _compiled(self, traced: torch.fx.GraphModule) -> Graph:
        # called as a module, a graph that fails (out of memory) walks its traceback by a generator, which Dynamo then
        # fails to trace and tells of instead
        return torch.compile(traced.forward, backend=self.backend, fullgraph=True, dynamic=False)


def _traced(function: Callable[..., Any], tensors: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Trace a function of tensors, without what its results do not need."""
    traced = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)
    _refuse_random(traced)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


class CompiledHalves(Halves):
    """Halves that run compiled; tiles of another size than `tokens` run eagerly, as each size would be compiled."""

    def __init__(self, plain: Halves, compiler: Compiler, tokens: int) -> None:
        self.layer, self.code = plain.layer, plain.code
        self.hidden_name, self.context = plain.hidden_name, plain.context
        self.compiler, self.tokens = compiler, tokens
        self.slots = Slots(self.layer)

    def differentiates(self, tokens: int) -> bool:
        """Whether tiles of so many tokens are compiled."""
        return tokens == self.tokens

    def through(
        self, x: Tensor, kwargs: dict[str, Any], names: frozenset[str], answer: Answer
    ) -> tuple[Tensor, Choices | None]:
        """Run one half, the attention, and the other half."""
        if x.shape[1] != self.tokens:
            return super().through(x, kwargs, names, answer)
        first = {name: value for name, value in kwargs.items() if name != ROUTING}
        y, _, choices = self.after(x, kwargs, answer(self.before(x, first, names)))
        return y, choices

    def before(self, x: Tensor, kwargs: dict[str, Any], names: frozenset[str], wanted: str = "qkv") -> Any:
        """Run the half before the mixer; of q, k and v only those `wanted` are computed."""
        if x.shape[1] != self.tokens:
            return super().before(x, kwargs, names)
        plain = super().before

        def function(inputs: Inputs, x: Tensor) -> tuple[Tensor, ...]:
            request = plain(x, inputs.kwargs, names)
            form.append(request.form)
            return request.tensors(wanted)

        form: list[Any] = []
        results, found = self._run(("before", wanted), function, kwargs, [x], form)
        if isinstance(found, DeltaNet):
            tokens, *weights = results
            return Recurrence(found, tokens, tuple(weights))  # type: ignore[arg-type]
        given = dict(zip([*wanted, "sinks"], results, strict=False))
        q, k, v = (given.get(name) for name in "qkv")
        return Request(self.layer, q, k, v, found.score, window=found.window, sinks=given.get("sinks"))  # type: ignore[arg-type]

    def after(self, x: Tensor, kwargs: dict[str, Any], out: Tensor) -> tuple[Tensor, None, Choices | None]:
        """Run the half after attention; the call it answers is not returned."""
        if x.shape[1] != self.tokens:
            return super().after(x, kwargs, out)
        half = self._half_after()

        def function(inputs: Inputs, x: Tensor, out: Tensor) -> list[Tensor]:
            return half(inputs, x, out)[1]

        (y, *choices), _ = self._run("after", function, kwargs, [x, out])
        return y, None, Choices(*choices) if choices else None

    def after_keeping(
        self, x: Tensor, kwargs: dict[str, Any], out: Tensor
    ) -> tuple[Tensor, Choices | None, list[Tensor]]:
        """Run the half after attention -> [B, t, d], what gates chose, and the products that `differentiate_after` can
        use; none if the half writes into its operands."""
        joint, call = self._joint(x, kwargs, out)
        if joint is None:
            y, _, choices = self.after(x, kwargs, out)
            return y, choices, []
        with torch.no_grad():
            y, *rest = joint.forward(*call.flow)
        choices, products = rest[: joint.results - 1], rest[joint.results - 1 :]
        return y, Choices(*choices) if choices else None, products

    def differentiate_after(
        self,
        x: Tensor,
        kwargs: dict[str, Any],
        out: Tensor,
        douts: Sequence[Tensor],
        need_x: bool,
        products: Sequence[Tensor] = (),
    ) -> tuple[Tensor | None, Tensor, list[Tensor | None]]:
        """Differentiate the half after attention: gradients of x, of the attention output, and of the parameters.

        Args:
            douts: the gradient of the tile, and with a `Routing` that of the sums of probabilities.
            products: what `after_keeping` returned; none to compute them again.
        """
        if products:
            joint, call = self._joint(x, kwargs, out)
            assert joint is not None
            flow = [*call.flow[:2], *(_plain(d.detach()) for d in douts), *call.flow[2:], *products]
            with torch.no_grad():
                dx, dout, *rest = joint.backward(*flow)
            return dx if need_x else None, dout, rest
        half = self._half_after()

        def function(inputs: Inputs, x: Tensor, out: Tensor, *douts: Tensor) -> list[Tensor | None]:
            return inputs.gradients(lambda x, out: half(inputs, x, out)[0], [x, out], douts, need_x)

        results, _ = self._run(("after'", need_x), function, kwargs, [x, out, *douts])
        dx, dout, *rest = results
        return dx, dout, rest

    def _half_after(self) -> Callable[..., tuple[list[Tensor], list[Tensor]]]:
        """Return the half as a function -> what is differentiated, and all that it returns."""
        plain = super().after

        def half(inputs: Inputs, x: Tensor, out: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            y, _, choices = plain(x, inputs.kwargs, out)
            return [y, *(choices or ())[:1]], [y, *(choices or ())]

        return half

    def _joint(self, x: Tensor, kwargs: dict[str, Any], out: Tensor) -> tuple[Joint | None, TracedCall]:
        """Return the half after attention and its derivative, apart, and what this call gives to it."""
        half, found = self._half_after(), []
        routing: Routing | None = kwargs.get(ROUTING)

        def function(inputs: Inputs, x: Tensor, out: Tensor, *douts: Tensor) -> list[Tensor | None]:
            def differentiated(x: Tensor, out: Tensor) -> list[Tensor]:
                outs, results = half(inputs, x, out)
                found.extend(results)
                return outs

            gradients = inputs.gradients(differentiated, [x, out], douts, True)
            return [*(result.detach() for result in found), *gradients]

        call = self._call("joint", function, kwargs, [x, out])
        if call.key not in self.compiler.joints:
            douts = [torch.empty_like(x)]
            if routing is not None:
                douts.append(x.new_empty(routing.router.experts, dtype=wide(x.dtype)))
            full = self._call("joint", function, kwargs, [x, out, *douts])
            results, tangents = 1 if routing is None else 3, range(2, 2 + len(douts))
            self.compiler.joints[call.key] = self.compiler.joint(full.function, full.flow, results, tangents)
        return self.compiler.joints[call.key], call

    def differentiate_before(
        self, x: Tensor, kwargs: dict[str, Any], grads: Sequence[Tensor], need_x: bool, names: frozenset[str]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Differentiate the half before the mixer: gradients of x and of the parameters.

        Args:
            grads: of what the call's `differentiable` returns, of the first of these.
        """
        plain = super().before

        def function(inputs: Inputs, x: Tensor, *grads: Tensor) -> list[Tensor | None]:
            def half(x: Tensor) -> list[Tensor]:
                return list(plain(x, inputs.kwargs, names).differentiable()[: len(grads)])

            return inputs.gradients(half, [x], grads, need_x)

        results, _ = self._run(("before'", need_x), function, kwargs, [x, *grads])
        dx, *rest = results
        return dx, rest

    def _run(
        self, half: Any, function: Callable[..., Any], kwargs: dict[str, Any], tensors: list[Tensor], form: Any = None
    ) -> tuple[Any, Any]:
        call = self._call(half, function, kwargs, tensors)
        with torch.no_grad():
            graph, found = self.compiler.graph(call.key, call.function, call.flow, form)
            return graph(*call.flow), found

    def _call(
        self, half: Any, function: Callable[..., Any], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> TracedCall:
        """Turn a function of (inputs, *tensors) into one of tensors alone."""
        leaves, spec = pytree.tree_flatten(kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        state = self.slots.tensors()
        count = (len(tensors), len(given))

        def flat(*all_tensors: Tensor) -> Any:
            own, passed, held = _split(all_tensors, *count)
            filled = iter(passed)
            values = [next(filled) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            inputs = Inputs(pytree.tree_unflatten(values, spec), held, self.slots.trained())
            with self.slots.holding(held):
                return function(inputs, *own)

        flow = [_plain(t.detach()) for t in (*tensors, *given)] + [t.detach() for t in state]
        shapes = tuple((tuple(t.shape), t.dtype) for t in flow)
        autocast = torch.is_autocast_enabled(flow[0].device.type) and torch.get_autocast_dtype(flow[0].device.type)
        key = (half, self.slots.kind, self.slots.trained(), shapes, others, str(spec), autocast)
        return TracedCall(key, flat, flow)


@dataclass
class TracedCall:
    """A call of a half: what tells its graph from others, the function to trace, and the tensors it is given."""

    key: Any
    function: Callable[..., Any]
    flow: list[Tensor]


@dataclass
class Inputs:
    """What a traced half is given: keyword arguments and the layer's tensors, of which some are trained."""

    kwargs: dict[str, Any]
    state: Sequence[Tensor]
    trained: tuple[bool, ...]

    def gradients(
        self, half: Callable[..., list[Tensor]], operands: list[Tensor], douts: Sequence[Tensor], need_x: bool
    ) -> list[Tensor | None]:
        """Differentiate `half(*operands)`; gradients of the operands (None for x if not needed), then of parameters."""
        parameters = [t for t, trained in zip(self.state, self.trained, strict=True) if trained]
        for tensor in (*operands[0 if need_x else 1 :], *parameters):
            tensor.requires_grad_()
        wanted = [*operands[0 if need_x else 1 :], *parameters]
        with torch.enable_grad():
            pairs = [(o, d) for o, d in zip(half(*operands), douts, strict=True) if o.requires_grad]
            if not pairs or not wanted:
                return [None] * (len(operands) + len(parameters))
            grads = torch.autograd.grad([o for o, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True)
        return list(grads) if need_x else [None, *grads]


class Slots:
    """The places of a layer's parameters and buffers, and a description of the layer that ignores their values."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        found: dict[int, list[tuple[dict[str, Any], str]]] = {}
        order: list[int] = []
        for module in layer.modules():
            for holder in (module._parameters, module._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        if id(tensor) not in found:
                            order.append(id(tensor))
                        found.setdefault(id(tensor), []).append((holder, name))
        self.places = [found[i] for i in order]
        self.kind = tuple((name, type(module), _settings(module)) for name, module in layer.named_modules())

    def tensors(self) -> list[Tensor]:
        """Return the tensors at the places now."""
        return [holder[name] for (holder, name), *_ in self.places]

    def trained(self) -> tuple[bool, ...]:
        """Tell of each tensor whether it is trained, in the order of `layer.parameters()` for those that are."""
        return tuple(t.requires_grad for t in self.tensors())

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Put other tensors into the places for a while."""
        before = self.tensors()
        try:
            self._put(tensors)
            yield
        finally:
            self._put(before)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for places, tensor in zip(self.places, tensors, strict=True):
            for holder, name in places:
                holder[name] = tensor


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's settings and hooks; its index in the model makes no difference to what it computes."""
    items = [(name, repr(value)) for name, value in plain_settings(module).items() if name != "layer_idx"]
    nested = [(k, repr(v)) for k, v in vars(module).items() if isinstance(v, dict | list | tuple | set) and k[0] != "_"]
    hooks = [("hook", id(hook)) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())]
    numbered = sorted({*items, *nested})
    return (*((name, _NUMBER_IN_NAME.sub(".N.", value)) for name, value in numbered), *hooks)


_NUMBER_IN_NAME = re.compile(r"\.\d+\.")
"""The index of a layer in the name of a module, which adapters note down."""


def _refuse_random(traced: torch.fx.GraphModule) -> None:
    """Raise if a traced half draws random numbers: run again, it would draw others.

    Raises:
        ModelError: it does.
    """
    for node in traced.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ModelError(
                f"A layer draws random numbers ({node.target}), which compiled tiles cannot draw again: switch its "
                "dropout or noise off, or leave `compile` out of the memory settings."
            )


def _split(tensors: Sequence[Tensor], own: int, passed: int) -> tuple[Sequence[Tensor], ...]:
    return tensors[:own], tensors[own : own + passed], tensors[own + passed :]


def _plain(t: Tensor) -> Tensor:
    """Give a tensor the strides of its shape: a cut of one row has those of the row, which differ from one length to
    the next and would each be compiled for."""
    return t.reshape(-1).view(t.shape)

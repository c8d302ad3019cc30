"""Run any token-wise function tile by tile, with the gradients of one run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from longspan.errors import BatchError, ConfigError, ModelError
from longspan.tiling import Ambient, GradientSum, first_order, private_graph, refuse_shards, wide_dtype

TILE_TOKENS = 16_384
"""Tokens per tile where nothing else is asked for: large enough for matrix products to run at full rate."""

Cut = tuple[int, int]


def tile(
    fn: Callable[..., Any],
    *inputs: Any,
    whole: Mapping[str, Any] | None = None,
    parameters: Sequence[Tensor] | None = None,
    tiles: int | None = None,
    tile_tokens: int | None = None,
    dim: int = 1,
    reduce: Literal["sum"] | None = None,
) -> Any:
    """Run a function that treats tokens alike on one slice of tokens after the other; differentiable.

    Forward keeps the inputs alone. Backward runs each tile again, with the same autocast and random numbers, and adds
    the gradients of parameters and whole arguments up in float32 or wider; autograd, and so DDP, FSDP2 or ZeRO, sees
    one gradient of each. Nothing in it communicates, so ranks may cut their tokens into different numbers of tiles.

    Args:
        fn: called as fn(*tiles of the inputs, **whole). If it is a module its parameters are found.
        inputs: tensors, or nested tuples, lists and dicts of them; each is cut along `dim`, anything else is handed on.
        whole: arguments that every tile gets uncut; tensors among them get gradients too.
        parameters: the leaves that fn uses by other ways than its arguments and that are trained. One that is
            missing here is an error.
        tiles: number of tiles, at most one per token. Sizes differ by one token at most.
        tile_tokens: tokens per tile, in place of `tiles`; with neither, 16384.
        dim: dim of the tokens, in every input and, unless reduced, in every output.
        reduce: "sum" adds the outputs of all tiles, for losses; None puts them next to each other along `dim`.

    Returns:
        What fn returns, a tensor or a tuple of tensors, for all tokens.

    Raises:
        BatchError: inputs that differ in their number of tokens, or have no such dim.
        ConfigError: a number or size of tiles below 1, or both.
        ModelError: a tensor that fn uses without its being declared, a parameter that is sharded at this moment, an
            output that does not fit, an input that fn writes to.

    Cost: fn runs twice, and not a third time if this ends a region under non-reentrant checkpointing. The outputs, one
        tile's activations, and a contiguous copy of a tile where its rows are not. No collectives, no host syncs.
    """
    run, tensors = _bind(fn, inputs, whole or {}, dim, reduce)
    cuts = tuple(cut_tokens(_tokens(tensors[: run.count], dim), tiles, tile_tokens))
    trained = _parameters(fn, parameters)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*tensors, *trained)):
        outputs, _ = run.forward(tensors, cuts, trained, check=torch.is_grad_enabled())
    else:
        # Saving comes first: a checkpoint's recomputation stops once it has what was saved, before any tile runs.
        kept = _Kept.apply(torch.empty(0, device=tensors[0].device, requires_grad=True), *(t.detach() for t in tensors))
        outputs = TiledFunction.apply(run, cuts, kept.grad_fn, kept, *tensors, *trained)
    return outputs[0] if run.single else outputs


def cut_tokens(tokens: int, tiles: int | None, tile_tokens: int | None) -> Iterator[Cut]:
    """Yield start and stop of each tile, in order; no tokens make one empty tile, so that gradients exist.

    Raises:
        ConfigError: see `tile`.
    """
    for name, value in (("tiles", tiles), ("tile_tokens", tile_tokens)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
    if tiles is not None and tile_tokens is not None:
        raise ConfigError(f"Give either tiles or tile_tokens, not both (got {tiles} and {tile_tokens}).")
    if tiles is None:
        size = tile_tokens or TILE_TOKENS
        starts = [*range(0, max(tokens, 1), size), tokens]
    else:
        count = max(1, min(tiles, tokens))
        starts = [tokens * i // count for i in range(count + 1)]
    yield from zip(starts[:-1], starts[1:], strict=True)


class _Run:
    """A function, and how its arguments are put together from tensors.

    Args:
        spec, leaves: (inputs, whole), flattened.
        count: how many of the tensors among the leaves are cut; the others go to every tile.
    """

    def __init__(
        self, fn: Callable[..., Any], spec: TreeSpec, leaves: list[Any], count: int, dim: int, reduce: str | None
    ) -> None:
        self.fn, self.spec, self.count, self.dim, self.reduce = fn, spec, count, dim, reduce
        self.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.single = True

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run one tile."""
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        versions = [None if t.is_inference() else t._version for t in tensors]
        outputs = self.fn(*args, **kwargs)
        if any(v is not None and t._version != v for t, v in zip(tensors, versions, strict=True)):
            raise ModelError(f"{_told(self.fn)} writes into its arguments, so it cannot run again in backward.")
        self.single = isinstance(outputs, Tensor)
        outputs = (outputs,) if self.single else tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        if not outputs or not all(isinstance(output, Tensor) for output in outputs):
            found = ", ".join(type(output).__name__ for output in outputs) or "nothing"
            raise ModelError(f"{_told(self.fn)} must return a tensor or a tuple of tensors, got {found}.")
        return outputs

    def tile(self, tensors: Sequence[Tensor], at: Cut) -> list[Tensor]:
        """Return the tensors of one tile, those that are cut contiguous."""
        return [_rows(t, self.dim, at).contiguous() if i < self.count else t for i, t in enumerate(tensors)]

    def forward(
        self, tensors: Sequence[Tensor], cuts: tuple[Cut, ...], parameters: Sequence[Tensor], check: bool
    ) -> tuple[tuple[Tensor, ...], list[bool]]:
        """Compute the outputs for all tokens, and say which of them can be differentiated.

        Args:
            check: record the graph of the first tile, to see what it depends on.
        """
        collected = _Collected(self.fn, self.dim, cuts[-1][1], self.reduce)
        differentiable: list[bool] = []
        for i, cut in enumerate(cuts):
            with torch.no_grad():
                tile = self.tile(tensors, cut)
            if i == 0 and check:
                leaves = [part.detach().requires_grad_(t.requires_grad) for part, t in zip(tile, tensors, strict=True)]
                with private_graph(parameters):
                    born = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
                    outputs = self(leaves)
                _refuse_undeclared(self.fn, outputs, {id(t) for t in (*leaves, *parameters)}, born)
                differentiable = [output.requires_grad for output in outputs]
                outputs = tuple(output.detach() for output in outputs)
            else:
                with torch.no_grad():
                    outputs = self(tile)
            collected.add(outputs, cut)
        return collected.outputs(), differentiable

    def backward(
        self,
        tensors: Sequence[Tensor],
        cuts: tuple[Cut, ...],
        parameters: Sequence[Tensor],
        needed: Sequence[bool],
        d_outputs: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Return the gradients of inputs in their own dtype, then those of whole tensors and parameters in a wide one.

        Args:
            needed: which of the tensors need a gradient.
            d_outputs: gradients of the outputs; None for one that nobody used.
        """
        inputs = tensors[: self.count]
        whole = [t.detach().requires_grad_(need) for t, need in list(zip(tensors, needed, strict=True))[self.count :]]
        shared = [t for t in (*whole, *parameters) if t.requires_grad]
        d_inputs = [
            torch.zeros_like(t, memory_format=torch.contiguous_format) if need else None
            for t, need in zip(inputs, needed, strict=False)
        ]
        sums = GradientSum(len(shared))
        for at in cuts:
            leaves = [t.detach().requires_grad_(n) for t, n in zip(self.tile(inputs, at), needed, strict=False)]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = self._differentiate([*leaves, *whole], at, d_outputs, [*wanted, *shared])
            for d_input, gradient in zip([d for d in d_inputs if d is not None], found, strict=False):
                if gradient is not None:
                    _rows(d_input, self.dim, at).copy_(gradient)
            sums.add(found[len(wanted) :])
        totals = iter(sums.sums)
        return [*d_inputs, *(next(totals) if t.requires_grad else None for t in (*whole, *parameters))]

    def _differentiate(
        self, tensors: Sequence[Tensor], at: Cut, d_outputs: Sequence[Tensor | None], targets: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Run one tile with its graph, and return the gradients of the targets."""
        pairs = [
            (output, d if self.reduce else _rows(d, self.dim, at))
            for output, d in zip(self(tensors), d_outputs, strict=True)
            if d is not None and output.requires_grad
        ]
        if not pairs:
            return [None] * len(targets)
        outputs, gradients = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, targets, gradients, allow_unused=True)


class _Collected:
    """Outputs of tiles, put next to each other or added up."""

    def __init__(self, fn: Callable[..., Any], dim: int, tokens: int, reduce: str | None) -> None:
        self.fn, self.dim, self.tokens, self.reduce = fn, dim, tokens, reduce
        self.results: list[Tensor] = []
        self.dtypes: list[torch.dtype] = []

    def add(self, outputs: tuple[Tensor, ...], at: Cut) -> None:
        """Take the outputs of the next tile."""
        if self.reduce is None:
            for output in outputs:
                self._check(output, at[1] - at[0])
        if not self.dtypes:
            self.dtypes = [output.dtype for output in outputs]
            self.results = [self._empty(output) for output in outputs]
        for result, output in zip(self.results, outputs, strict=True):
            if self.reduce is None:
                _rows(result, self.dim, at).copy_(output)
            else:
                result.add_(output)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return them for all tokens, in the dtypes of the first tile's."""
        return tuple(result.to(dtype) for result, dtype in zip(self.results, self.dtypes, strict=True))

    def _empty(self, output: Tensor) -> Tensor:
        if self.reduce is not None:
            wide = wide_dtype(output.dtype) if output.is_floating_point() else output.dtype
            return torch.zeros_like(output, dtype=wide, memory_format=torch.contiguous_format)
        shape = list(output.shape)
        shape[self.dim] = self.tokens
        return output.new_empty(shape)

    def _check(self, output: Tensor, tokens: int) -> None:
        if not -output.dim() <= self.dim < output.dim() or output.shape[self.dim] != tokens:
            raise ModelError(
                f"{_told(self.fn)} turned {tokens} tokens into {list(output.shape)}, which cannot be put next to other "
                f"tiles along dim {self.dim}: return one value per token, or pass reduce='sum' for a sum over tokens."
            )


class _Kept(torch.autograd.Function):
    """Saves tensors for `TiledFunction`, before that runs; returns a stand-in without elements."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None,) * len(ctx.needs_input_grad)


class TiledFunction(torch.autograd.Function):
    """Runs a function tile by tile; parameters are inputs, so that each gets its gradient once, after the last tile."""

    @staticmethod
    def forward(ctx: Any, run: _Run, cuts: tuple[Cut, ...], saved: Any, _: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        count = len(run.places)
        # Parameters are not saved as tensors: hooks that offload these would return copies that fn does not use.
        ctx.run, ctx.cuts, ctx.saved, ctx.parameters = run, cuts, saved, tensors[count:]
        ctx.ambient = Ambient.capture(tensors[0].device, rng=True)
        with Ambient.capture(tensors[0].device, rng=False).restored():
            outputs, differentiable = run.forward(tensors[:count], cuts, ctx.parameters, check=True)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, differentiable, strict=True) if not d))
        return outputs

    @staticmethod
    @first_order
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4 : 4 + len(ctx.run.places)]
        with ctx.ambient.restored(), private_graph(ctx.parameters):
            tensors = ctx.saved.saved_tensors
            grads = ctx.run.backward(tensors, ctx.cuts, ctx.parameters, needed, d_outputs)
        dtypes = [t.dtype for t in (*tensors, *ctx.parameters)]
        return None, None, None, None, *(None if g is None else g.to(d) for g, d in zip(grads, dtypes, strict=True))


def _bind(
    fn: Callable[..., Any], inputs: tuple[Any, ...], whole: Mapping[str, Any], dim: int, reduce: str | None
) -> tuple[_Run, list[Tensor]]:
    """Take the arguments apart into tensors, those that are cut first, and what puts them together again."""
    if reduce not in (None, "sum"):
        raise ConfigError(f"reduce must be 'sum' or None, got {reduce!r}.")
    cut = sum(isinstance(leaf, Tensor) for leaf in tree_flatten(inputs)[0])
    leaves, spec = tree_flatten((inputs, dict(whole)))
    run = _Run(fn, spec, leaves, cut, dim, reduce)
    return run, [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _tokens(inputs: Sequence[Tensor], dim: int) -> int:
    """Return the number of tokens that all inputs share."""
    if not inputs:
        raise BatchError("tile got no tensor to cut; pass the tensors that hold tokens as positional arguments.")
    for tensor in inputs:
        if not -tensor.dim() <= dim < tensor.dim():
            raise BatchError(f"tile cuts its inputs along dim {dim}, but one has shape {list(tensor.shape)}.")
    sizes = {tensor.shape[dim] for tensor in inputs}
    if len(sizes) > 1:
        raise BatchError(
            f"tile got inputs of {sorted(sizes)} tokens along dim {dim}; pass what is not to be cut in `whole`."
        )
    return sizes.pop()


def _parameters(fn: Callable[..., Any], named: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """List the leaves that are trained inside fn, each once."""
    found = dict(fn.named_parameters()) if isinstance(fn, nn.Module) else {}
    found |= {f"parameter {i}": p for i, p in enumerate(named or ())}
    refuse_shards(found, "tile's")
    for name, parameter in found.items():
        if not isinstance(parameter, Tensor) or not parameter.is_leaf:
            raise ModelError(
                f"tile was given {name} ({type(parameter).__name__}), which is not a leaf; pass what other operations "
                "have made in `whole`."
            )
    return tuple({id(p): p for p in found.values() if p.requires_grad}.values())


def _refuse_undeclared(fn: Callable[..., Any], outputs: tuple[Tensor, ...], declared: set[int], born: int) -> None:
    """Refuse a graph that reaches leaves or operations outside the tile: they would get no gradient, or several.

    Args:
        declared: ids of the leaves it may reach.
        born: the sequence number of the first operation inside the tile.
    """
    stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    leaves = [output for output in outputs if output.requires_grad and output.is_leaf]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        elif node._sequence_nr() < born:
            raise ModelError(
                f"{_told(fn)} uses a tensor that was computed outside of it ({node.name()}) and needs a gradient; pass "
                "it as an input, or in `whole` if it is not to be cut."
            )
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    for leaf in leaves:
        if id(leaf) not in declared:
            raise ModelError(
                f"{_told(fn)} uses {_name(fn, leaf)} of shape {list(leaf.shape)}, which needs a gradient and was not "
                "named: pass it in `parameters`."
            )


def _name(fn: Callable[..., Any], leaf: Tensor) -> str:
    """Say what fn calls a tensor, as far as its closure and globals tell."""
    try:
        seen = inspect.getclosurevars(fn)
        names = {**seen.globals, **seen.nonlocals}
    except TypeError:
        names = {}
    names["self"] = getattr(fn, "__self__", None)
    for name, value in names.items():
        if value is leaf:
            return name
        if isinstance(value, nn.Module):
            for inner, parameter in value.named_parameters():
                if parameter is leaf:
                    return f"{name}.{inner}"
    return "a parameter"


def _rows(tensor: Tensor, dim: int, at: Cut) -> Tensor:
    return tensor.narrow(dim, at[0], at[1] - at[0])


def _told(fn: Callable[..., Any]) -> str:
    return type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__qualname__", type(fn).__name__)

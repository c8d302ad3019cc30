"""What every computation needs that runs tile by tile inside one autograd function and differentiates its own tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from longspan.errors import ConfigError, ModelError, TrainingError
from longspan.kernels.protocol import wide as wide_dtype
from longspan.plan.tiles import FIRST_LOGIT_TILE_TOKENS, LOGIT_TILE_ELEMENTS

_SLICE_ELEMENTS = 1 << 24


@contextmanager
def private_graph(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Record and differentiate a tile's graph without the rest of the program noticing.

    Hooks on `parameters` stay quiet: autograd calls them outside, once, with the whole gradient. Saved-tensor hooks
    that surround the call (offloading, checkpointing) see none of the tile's tensors.

    Args:
        parameters: leaves, or tensors that carry no hooks of their own.
    """
    hooks = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooks:
        parameter._backward_hooks = None
    try:
        # Detached: an output that an operation saves would hold that operation, and the graph never be freed.
        with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
            yield
    finally:
        for parameter, old in hooks:
            parameter._backward_hooks = old


@dataclass(frozen=True)
class Ambient:
    """Remember what a computation depends on besides its arguments, so that a recompute gives the same numbers."""

    device: torch.device
    autocast_dtype: torch.dtype | None  # None: autocast is off
    rng: tuple[Tensor, ...] = ()  # the CPU generator's state, then the device's

    @classmethod
    def capture(cls, device: torch.device, rng: bool) -> Ambient:
        """Read the current state: autocast of the device's type and, if asked, the generators."""
        dtype = None
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return cls(device, dtype, _rng_state(device) if rng else ())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Compute as at the time of the capture; afterwards the generators stand where they stood before."""
        outer = _rng_state(self.device) if self.rng else ()
        _set_rng_state(self.device, self.rng)
        try:
            with self._autocast():
                yield
        finally:
            _set_rng_state(self.device, outer)

    def rewind(self) -> None:
        """Put the generators back to where they stood at the capture."""
        _set_rng_state(self.device, self.rng)

    def reseeded(self, number: int) -> Ambient:
        """Return the same surroundings with generators of their own, seeded from these and a number."""
        digest = hashlib.blake2b(number.to_bytes(8, "big"), digest_size=7)
        for state in self.rng:  # all of them: a GPU's draws do not move the CPU's generator
            digest.update(state.cpu().numpy().tobytes())
        seed = int.from_bytes(digest.digest(), "big")
        devices = ["cpu"] if len(self.rng) == 1 else ["cpu", self.device]
        return replace(self, rng=tuple(torch.Generator(d).manual_seed(seed).get_state() for d in devices))

    def _autocast(self):
        if not torch.amp.is_autocast_available(self.device.type):
            return nullcontext()
        # Cached, a cast weight would stay until the caller's autocast ends, and one cast without gradients has been
        # handed out by some versions of torch where they were needed.
        return torch.autocast(
            self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None, cache_enabled=False
        )


def _rng_state(device: torch.device) -> tuple[Tensor, ...]:
    if device.type in ("cpu", "meta"):
        return (torch.get_rng_state(),)
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


def _set_rng_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    if state:
        torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.get_device_module(device).set_rng_state(state[1], device)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a Function's backward refuse create_graph=True, under which its gradients would be constants."""

    @wraps(backward)
    def checked(ctx: Any, *d_outputs: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise TrainingError(
                "Gradients of a tiled computation cannot be differentiated again; call backward without create_graph, "
                "or compute this part without tiles."
            )
        return backward(ctx, *d_outputs)

    return checked


def refuse_shards(parameters: Mapping[str, Tensor], what: str) -> None:
    """Raise unless the parameters are whole at this moment.

    Args:
        what: whose they are, for the message.

    Raises:
        ModelError: one of them is sharded.
    """
    for name, parameter in parameters.items():
        # ZeRO-3 leaves an empty tensor between calls, FSDP2 a DTensor.
        if parameter.numel() == 0 or hasattr(parameter, "to_local"):
            raise ModelError(
                f"{what} {name} is sharded at this moment (shape {tuple(parameter.shape)}, "
                f"{type(parameter).__name__}). Call it inside the forward of the module that fully_shard was called "
                "on (under ZeRO-3: of a leaf module, see set_z3_leaf_modules), or gather the parameter first."
            )


class GradientSum:
    """Add up the gradients of the same tensors over tiles, in float32 or wider.

    The last gradients wait as they came, so that adding them up and rounding the sum is one pass over memory, and a
    single tile costs none.
    """

    def __init__(self, count: int) -> None:
        self._totals: list[Tensor | None] = [None] * count
        self._waiting: list[list[Tensor]] = [[] for _ in range(count)]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one tile's gradients; None stands for a tensor that the tile did not use."""
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            waiting = self._waiting[i]
            if len(waiting) == (2 if self._totals[i] is None else 1):
                self._settled(i)
            waiting.append(gradient)

    @property
    def sums(self) -> list[Tensor | None]:
        """The sums, float32 or wider, each in memory of its own; None for a tensor that no tile used."""
        return [self._settled(i) for i in range(len(self._totals))]

    def rounded(self, dtypes: Sequence[torch.dtype]) -> Iterator[Tensor | None]:
        """Yield the sums in these dtypes, rounded once."""
        for i, dtype in enumerate(dtypes):
            total, waiting = self._totals[i], self._waiting[i]
            if total is None and len(waiting) == 1:
                yield waiting[0].to(dtype)
            elif total is None and len(waiting) == 2 and waiting[0].dtype == waiting[1].dtype == dtype:
                yield waiting[0] + waiting[1]  # computed in float32 or wider, whatever the dtype
            elif total is not None and len(waiting) == 1:
                yield torch.add(total, waiting[0], out=torch.empty_like(total, dtype=dtype))
            else:
                total = self._settled(i)
                yield None if total is None else total.to(dtype)

    def _settled(self, i: int) -> Tensor | None:
        """Add what waits to the sum, and return it."""
        total = self._totals[i]
        for gradient in self._waiting[i]:
            if total is None:
                # Autograd may return one tensor for two parameters; the sum is made in place, so it owns its memory.
                wide = wide_dtype(gradient.dtype)
                total = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
            else:
                total.add_(gradient)
        self._waiting[i].clear()
        self._totals[i] = total
        return total


def scaled(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a contiguous tensor by a 0-d tensor in the wider dtype of both, and round once to `dtype`.

    On a GPU torch first rounds the 0-d factor to the dtype of a narrow tensor: one relative error for all elements.

    Cost: the result, and one slice in the wide dtype; no host sync.
    """
    wide = torch.promote_types(tensor.dtype, scale.dtype)
    if tensor.dtype == wide == dtype:
        return tensor * scale
    out = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    for source, target in zip(tensor.view(-1).split(_SLICE_ELEMENTS), out.view(-1).split(_SLICE_ELEMENTS), strict=True):
        target.copy_(source.to(wide) * scale)
    return out


@dataclass(frozen=True)
class Tiled:
    """A computation on tokens that treats each alike, and how to cut it.

    Args:
        evaluate: (hidden [n, d], labels [n]) -> terms, tensors [n] each, and the width: elements per token of the
            widest tensor it makes.
        parameters: the tensors inside `evaluate` that require gradients; leaves, or free of hooks.
        tile_tokens: tokens per tile; None: a first tile of 512, then as many as make 1 GiB of float32 of that width.
    """

    evaluate: Callable[[Tensor, Tensor], tuple[tuple[Tensor, ...], int]]
    parameters: tuple[Tensor, ...]
    tile_tokens: int | None

    def __post_init__(self) -> None:
        if self.tile_tokens is not None and self.tile_tokens < 1:
            raise ConfigError(f"tile_tokens must be at least 1, or None to choose, got {self.tile_tokens}.")

    def sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Add up the only term over all tokens; differentiable, gradients are made in the same pass."""
        parameters = self._trained(hidden)
        if parameters is None:
            return self.outputs(hidden, labels)[0].sum()
        return _Sum.apply(self, labels, hidden, *parameters)

    def per_token(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Compute the terms [n] of all tokens; differentiable, backward evaluates each tile again."""
        parameters = self._trained(hidden)
        if parameters is None:
            return self.outputs(hidden, labels)
        return _PerToken.apply(self, labels, hidden, *parameters)

    def outputs(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Compute the terms of all tokens, without gradients: hidden [n, d], labels [n] -> tensors [n]."""
        tiles: list[tuple[Tensor, ...]] = []

        def visit(rows: slice) -> int:
            terms, width = self.evaluate(hidden[rows], labels[rows])
            tiles.append(terms)
            return width

        with torch.no_grad(), Ambient.capture(hidden.device, rng=False).restored():
            self._walk(len(hidden), visit)
        return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))

    def differentiate(
        self,
        hidden: Tensor,
        labels: Tensor,
        parameters: tuple[Tensor, ...],
        d_outputs: tuple[Tensor | None, ...] | None,
        need_hidden: bool,
    ) -> tuple[tuple[Tensor, ...], Tensor | None, list[Tensor | None]]:
        """Compute terms and gradients tile by tile.

        Args:
            d_outputs: gradient [n] of each term, None for a term that nobody used; None: ones, for all terms.

        Returns:
            The terms [n]; the gradient of hidden [n, d] in its dtype; those of the parameters, float32 or wider.
        """
        d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if need_hidden else None
        sums = GradientSum(len(parameters))
        tiles: list[tuple[Tensor, ...]] = []

        def visit(rows: slice) -> int:
            tile = hidden[rows].detach().requires_grad_(need_hidden)
            terms, width = self.evaluate(tile, labels[rows])
            tiles.append(tuple(term.detach() for term in terms))
            d_terms = [torch.ones_like(t) for t in terms] if d_outputs is None else [_rows(d, rows) for d in d_outputs]
            used = [i for i, d in enumerate(d_terms) if d is not None]
            gradients = torch.autograd.grad(
                [terms[i] for i in used],
                (tile, *parameters) if need_hidden else parameters,
                [d_terms[i] for i in used],
                allow_unused=True,
            )
            if d_hidden is not None:
                d_hidden[rows], *gradients = gradients
            sums.add(gradients)
            return width

        with private_graph(parameters):
            self._walk(len(hidden), visit)
        return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True)), d_hidden, sums.sums

    def _trained(self, hidden: Tensor) -> tuple[Tensor, ...] | None:
        """List the parameters to differentiate; None if neither they nor hidden need a gradient."""
        parameters = tuple(p for p in self.parameters if p.requires_grad)
        return parameters if torch.is_grad_enabled() and (parameters or hidden.requires_grad) else None

    def _walk(self, tokens: int, visit: Callable[[slice], int]) -> None:
        """Call `visit` with the rows of each tile, in order; it returns the width.

        No tokens make one empty tile, so that gradients are zeros and not missing.
        """
        start, size = 0, self.tile_tokens or FIRST_LOGIT_TILE_TOKENS
        while True:
            stop = min(start + size, tokens)
            width = visit(slice(start, stop))
            if stop == tokens:
                return
            start, size = stop, self.tile_tokens or max(1, LOGIT_TILE_ELEMENTS // width)


class _Sum(torch.autograd.Function):
    """Add up the only term of all tokens; its gradients are made along the way and scaled in backward."""

    @staticmethod
    def forward(ctx: Any, tiled: Tiled, labels: Tensor, hidden: Tensor, *parameters: Tensor) -> Tensor:
        with Ambient.capture(hidden.device, rng=False).restored():
            (terms,), d_hidden, sums = tiled.differentiate(hidden, labels, parameters, None, ctx.needs_input_grad[2])
        ctx.dtypes = [hidden.dtype, *(p.dtype for p in parameters)]
        ctx.save_for_backward(d_hidden, *sums)
        return terms.sum()

    @staticmethod
    @first_order
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        made = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, *(None if g is None else scaled(g, d_sum, dtype) for g, dtype in made)


class _PerToken(torch.autograd.Function):
    """Compute terms per token; backward evaluates each tile again, with the numbers that forward drew."""

    @staticmethod
    def forward(ctx: Any, tiled: Tiled, labels: Tensor, hidden: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Not saved as tensors: hooks that offload saved tensors would return copies that the head does not use.
        ctx.tiled, ctx.parameters = tiled, parameters
        ctx.ambient = Ambient.capture(hidden.device, rng=True)
        ctx.save_for_backward(hidden, labels)
        return tiled.outputs(hidden, labels)

    @staticmethod
    @first_order
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        with ctx.ambient.restored():
            _, d_hidden, sums = ctx.tiled.differentiate(
                hidden, labels, ctx.parameters, d_outputs, ctx.needs_input_grad[2]
            )
        d_parameters = (None if g is None else g.to(p.dtype) for g, p in zip(sums, ctx.parameters, strict=True))
        return None, None, d_hidden, *d_parameters


def _rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]

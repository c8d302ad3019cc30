"""Tiled computation under the names and signatures of DeepSpeed's ALST."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.batch import IGNORE_INDEX
from longspan.errors import BatchError, ConfigError, ModelError
from longspan.integrations.deepspeed.leaves import leaves_of
from longspan.integrations.deepspeed.partitioned import Handed, partitioned
from longspan.tiled import tile
from longspan.tiling import Tiled

_REDUCTIONS = ("mean", "sum")


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:  # the signature is DeepSpeed's
    """Run `fn(**tiles, **kwargs_to_pass)` on one slice of tokens after the other; see `SequenceTiledCompute`."""
    return SequenceTiledCompute.apply(
        fn,
        seqlen,
        shards,
        list(kwargs_to_shard),
        list(kwargs_to_pass),
        grad_requiring_tensor_key,
        compute_params,
        output_unshard_dimension,
        output_reduction,
        *kwargs_to_shard.values(),
        *kwargs_to_pass.values(),
    )


class SequenceTiledCompute:
    """Any computation that treats tokens alike, tile by tile; called by `apply`, as an autograd function is."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        *rest: Any,
    ) -> Tensor:
        """Compute.

        Args:
            fn: called with keyword arguments alone.
            seqlen: tokens, along dim 1 of what is cut.
            shards: tiles, at most one per token.
            keys_to_shard, keys_to_pass: names of the arguments that are cut, and of those that every tile gets whole.
            grad_requiring_tensor_key: an argument that is cut; the others get gradients too if they need some.
            rest: compute_params (None finds what fn trains), output_unshard_dimension (1: outputs are put next to each
                other along the tokens; 0: fn returns one number, and these are stacked), output_reduction (None, "mean"
                or "sum", over all elements), and then the values of the keys.

        Returns:
            The outputs of all tiles, reduced or not; differentiable.

        Raises:
            ConfigError: unknown reductions or dimensions, keys that do not fit the values.
            BatchError: arguments to be cut that do not have `seqlen` tokens.
        """
        compute_params, dimension, reduction, *values = rest
        names = [*keys_to_shard, *keys_to_pass]
        if len(names) != len(values):
            raise ConfigError(f"{len(names)} keys were given with {len(values)} values.")
        _check_choices(grad_requiring_tensor_key, keys_to_shard, dimension, reduction)
        cut = dict(zip(keys_to_shard, values, strict=False))
        passed = dict(zip(keys_to_pass, values[len(keys_to_shard) :], strict=True))
        for name, value in cut.items():
            if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != seqlen:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise BatchError(f"{name} must be a tensor [B, seqlen={seqlen}, ...] to be cut, got {shape}.")

        def run(tiles: Mapping[str, Tensor], **whole: Any) -> Tensor:
            return fn(**tiles, **whole)

        if compute_params is None:
            first = {name: value.detach()[:, :1] for name, value in cut.items()}
            compute_params = leaves_of(run, first, passed)
        places = list(cut)

        def compute(*tensors: Tensor) -> Tensor:
            pieces = dict(zip(places, tensors, strict=True))
            if dimension == 1:
                out = tile(run, pieces, whole=passed, parameters=compute_params, tiles=shards)
                return out if reduction is None else out.mean() if reduction == "mean" else out.sum()
            return _numbers(run, pieces, passed, compute_params, shards, reduction)

        if partitioned(compute_params):
            lost = [name for name, value in passed.items() if isinstance(value, Tensor) and value.requires_grad]
            if lost:
                raise ModelError(f"{lost[0]} needs a gradient and is not cut, which ZeRO stage 3 does not allow here.")
        return _on(compute, compute_params, [*passed.values(), *_modules(fn)], *cut.values())


class TiledMLP:
    """An MLP, tile by tile of tokens; called by `apply`, as an autograd function is."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor, shards: int, compute_params: Sequence[Tensor] | None
    ) -> Tensor:
        """Compute fn(self, x).

        Args:
            fn: the MLP's forward.
            self: the module, or whatever fn takes first.
            x: [B, s, d] or, as for experts, [s, d].
            shards: tiles, at most one per token; ranks may use unlike numbers.
            compute_params: what fn trains; the parameters of `self` count too, and None leaves it at these.
        """
        if compute_params is None and not isinstance(self, nn.Module):
            compute_params = leaves_of(fn, self, x.detach()[..., :1, :])
        parameters = [*(compute_params or ()), *(self.parameters() if isinstance(self, nn.Module) else ())]

        def compute(hidden: Tensor) -> Tensor:
            return tile(lambda tokens: fn(self, tokens), hidden, parameters=parameters, tiles=shards, dim=-2)

        return _on(compute, parameters, [self, *_modules(fn)], x)


class AutogradComputeMLP:
    """`TiledMLP` with one tile: keeps the input alone, and computes the MLP again in backward."""

    @staticmethod
    def apply(fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor) -> Tensor:
        """Compute fn(self, x)."""
        return TiledMLP.apply(fn, self, x, 1, None)


class TiledFusedLogitsLoss:
    """The loss of hidden states, tile by tile, so that full logits never exist; called by `apply`."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None,
        output_reduction: str,
    ) -> Tensor:
        """Reduce fn(self, x, y[, mask]) over tiles.

        The incoming gradient scales the gradients of x and of the parameters alike.

        Args:
            fn: takes a tile's x [n, d], y [n], and the mask [n] if there is one; returns one number.
            self: what fn takes first: the head, or the model that holds it.
            x: [B, s, d]; y: [B, s, ...]; mask: [B, s] or None.
            shards: tiles of the B * s tokens, at most one per token.
            compute_params: what fn trains; None finds it.
            output_reduction: "sum" over the tiles, or "mean" over those with a target: a tile whose mean is NaN because
                all its labels are -100 counts for nothing.
        """
        _check_loss(x, y, mask, output_reduction)
        if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
            raise ConfigError(f"shards must be an integer of at least 1, got {shards!r}.")
        labels, masks = y.reshape(-1, *y.shape[2:]), None if mask is None else mask.reshape(-1)
        hidden = x.reshape(-1, *x.shape[2:])
        if compute_params is None:
            one = [hidden.detach()[:1], labels[:1], *(() if masks is None else (masks[:1],))]
            compute_params = leaves_of(fn, self, *one)
        trained = _trained(compute_params)

        def compute(tokens: Tensor) -> Tensor:
            return _loss(fn, self, (tokens, labels, masks), shards, trained, output_reduction)

        return _on(compute, compute_params, [self, *_modules(fn)], hidden)


class TiledLoss:
    """Has left DeepSpeed; names its replacement."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ModelError(
            "TiledLoss tiles logits that exist already; use TiledFusedLogitsLoss, or longspan.tiled_loss, which never "
            "form them, from hidden states."
        )

    apply = __init__


class UlyssesSPFwdLossBwdWithLogits:
    """Has left DeepSpeed; names its replacement."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ModelError(
            "UlyssesSPFwdLossBwdWithLogits is replaced by a loop: outputs = model(**batch) with a batch of "
            "UlyssesSPDataLoaderAdapter, the loss of batch['shift_labels'] on outputs.logits, reduced by "
            "longspan.reduce_loss over the ranks that share rows, engine.backward(loss)."
        )


def _loss(
    fn: Callable[..., Tensor],
    self: Any,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    shards: int,
    trained: tuple[Tensor, ...],
    reduction: str,
) -> Tensor:
    """Compute the loss and, in the same pass, its gradients."""
    hidden, labels, masks = tensors
    counted: list[Tensor] = []
    dtypes: list[torch.dtype] = []

    def evaluate(tokens: Tensor, at: Tensor) -> tuple[tuple[Tensor, ...], int]:
        # `at` holds the places of the tile's tokens: labels may have further dims, and a mask goes with them
        rows = slice(int(at[0]), int(at[-1]) + 1) if len(at) else slice(0, 0)
        value = fn(self, tokens, labels[rows], *(() if masks is None else (masks[rows],)))
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(f"The loss of a tile must be one number, got {shape}.")
        value = value.reshape(1)
        some = (labels[rows] != IGNORE_INDEX).any() | ~value.detach().isnan()
        counted.append(some.reshape(1))
        dtypes.append(value.dtype)
        return (torch.where(some, value, torch.zeros_like(value)),), 1

    tokens = len(hidden)
    places = torch.arange(tokens)  # on the host, so that reading them waits for nothing
    total = Tiled(evaluate, trained, max(1, -(-tokens // shards))).sum(hidden, places)
    if reduction == "mean":
        total = total / torch.cat(counted).sum().clamp(min=1)
    return total.to(dtypes[0])


def _numbers(
    run: Callable[..., Tensor],
    pieces: dict[str, Tensor],
    passed: dict[str, Any],
    parameters: Sequence[Tensor],
    shards: int,
    reduction: str | None,
) -> Tensor:
    """Compute one number per tile, and stack or reduce them."""
    tokens = next(iter(pieces.values())).shape[1]
    count = max(1, min(shards, tokens))
    if reduction is not None:
        out = tile(run, pieces, whole=passed, parameters=parameters, tiles=shards, reduce="sum")
        return (out / count if reduction == "mean" else out).squeeze()
    cuts = [tokens * i // count for i in range(count + 1)]
    parts = [
        {name: piece[:, start:stop] for name, piece in pieces.items()}
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    return torch.stack([tile(run, part, whole=passed, parameters=parameters, tiles=1, reduce="sum") for part in parts])


def _on(compute: Callable[..., Tensor], parameters: Sequence[Tensor], users: Sequence[Any], *inputs: Tensor) -> Tensor:
    """Run a computation; on parameters that ZeRO stage 3 holds in parts, in a way of its own.

    Args:
        users: among them the modules that use the parameters.
    """
    if not partitioned(parameters):
        return compute(*inputs)
    modules = nn.ModuleList(user for user in users if isinstance(user, nn.Module))
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    anchor = torch.empty(0, device=inputs[0].device, requires_grad=trains)  # backward is due if inputs need none, too

    def run(*given: Tensor) -> Tensor:
        return compute(*given[:-1])

    return Handed.apply(run, tuple(parameters), modules, *inputs, anchor)


def _trained(parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return what needs a gradient, each once."""
    return tuple({id(p): p for p in parameters if p.requires_grad}.values())


def _modules(fn: Callable[..., Any]) -> list[Any]:
    """Return the modules that a function is, is bound to, or has in its closure."""
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    return [each for each in (fn, getattr(fn, "__self__", None), *cells) if isinstance(each, nn.Module)]


def _check_choices(key: str, cut: Sequence[str], dimension: Any, reduction: Any) -> None:
    if key not in cut:
        raise ConfigError(f"grad_requiring_tensor_key '{key}' is none of the arguments that are cut, {list(cut)}.")
    if dimension not in (0, 1):
        raise ConfigError(
            f"output_unshard_dimension must be 1 for tokens, or 0 for one number per tile, got {dimension!r}."
        )
    if reduction not in (None, *_REDUCTIONS):
        raise ConfigError(f"output_reduction must be None, 'mean' or 'sum', got {reduction!r}.")


def _check_loss(x: Tensor, y: Tensor, mask: Tensor | None, reduction: Any) -> None:
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"output_reduction must be 'mean' or 'sum', got {reduction!r}.")
    if x.dim() < 2 or y.dim() < 2 or x.shape[:2] != y.shape[:2]:
        raise BatchError(f"x must be [B, s, ...] and y [B, s, ...], got {list(x.shape)} and {list(y.shape)}.")
    if mask is not None and mask.shape != x.shape[:2]:
        raise BatchError(f"mask must be [B, s] = {list(x.shape[:2])}, got {list(mask.shape)}.")

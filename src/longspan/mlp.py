"""Run the MLPs of a model tile by tile, in users' own loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longspan.errors import ModelError
from longspan.overrides import Overrides
from longspan.tiled import cut_tokens, tile
from longspan.tiling import Ambient

_NAMES = ("mlp", "feed_forward", "ffn")
"""What models call their MLPs."""

_PROBED_TOKENS = 4


def tiled_mlp(module: nn.Module, *, tiles: int | None = None, tile_tokens: int | None = None) -> TiledModules:
    """Make the MLPs of a model run tile by tile of tokens, so that one tile's activations exist at a time.

    What changes is the `forward` of these modules alone, not of their class; hooks on them run as before. Each is
    checked on a few tokens when it is first called: one whose tokens do not stand alone is refused. Ranks may cut into
    different numbers of tiles.

    Args:
        module: a model, whose submodules named mlp, feed_forward or ffn are tiled, or an MLP itself.
        tiles: number of tiles, at most one per token.
        tile_tokens: tokens of a row per tile, in place of `tiles`; with neither, 16384.

    Returns:
        A handle; `remove()`, or leaving it as a context, gives the modules their own forward back.

    Raises:
        ConfigError: a number or size of tiles below 1, or both.
        ModelError: there is no MLP, one is tiled already, or one holds experts: the statistics of its router would be
            taken tile by tile, and lose their gradients.

    Cost: as `longspan.tile`: forward runs twice.
    """
    list(cut_tokens(1, tiles, tile_tokens))
    found = [(n, m) for n, m in module.named_modules() if n.rpartition(".")[2] in _NAMES]
    if not found and hasattr(module, "get_input_embeddings"):
        raise ModelError(
            f"{type(module).__name__} has no submodule named {', '.join(_NAMES)}; pass its MLP modules one by one."
        )
    found = found or [("", module)]
    for name, mlp in found:
        _check(f"{name} ({type(mlp).__name__})".lstrip(), mlp)
    return TiledModules({n: TiledForward(n, m, tiles, tile_tokens) for n, m in found})


class TiledModules:
    """The modules that `tiled_mlp` made run in tiles; undoes it."""

    def __init__(self, forwards: dict[str, TiledForward]) -> None:
        self._forwards = forwards
        self._replaced = Overrides()
        for forward in forwards.values():
            self._replaced.set(forward.module, forward=forward)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules inside the one that was given."""
        return tuple(self._forwards)

    def remove(self) -> None:
        """Give the modules their own forward back; doing so again does nothing."""
        self._replaced.restore()

    def __enter__(self) -> TiledModules:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class TiledForward:
    """Stands in for the `forward` of a module that treats tokens alike: [..., s, d] -> [..., s, d']."""

    def __init__(self, name: str, module: nn.Module, tiles: int | None, tile_tokens: int | None) -> None:
        self.name, self.module, self.tiles, self.tile_tokens = name, module, tiles, tile_tokens
        self.original = module.forward
        self.probed = False
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(args) + len(kwargs) != 1 or len(tensors) != 1 or tensors[0].dim() < 2:
            raise ModelError(
                f"{self._told} is called with {len(args)} arguments and {sorted(kwargs)}; tiled_mlp runs modules that "
                "take hidden states [..., tokens, d] alone. Use longspan.tile for others."
            )
        name, x = next(iter(kwargs), None), tensors[0]

        def run(tokens: Tensor) -> Any:
            return self.original(tokens) if name is None else self.original(**{name: tokens})

        if not self.probed and x.shape[-2] > 1 and x.numel():
            self._probe(run, x.detach()[..., :_PROBED_TOKENS, :])
            self.probed = True
        parameters = list(self.module.parameters())
        return tile(run, x, parameters=parameters, tiles=self.tiles, tile_tokens=self.tile_tokens, dim=-2)

    def _probe(self, run: Callable[[Tensor], Any], x: Tensor) -> None:
        """Refuse a module whose tokens depend on each other, or that returns more than one value for each."""
        if stands_alone(self.module, run, x):
            return
        raise ModelError(
            f"{self._told} does not turn each token into one row, whatever the others are: it returns something else, "
            "or mixes tokens. tiled_mlp cannot run it in tiles; see longspan.tile."
        )

    @property
    def _told(self) -> str:
        return f"{self.name} ({type(self.module).__name__})".lstrip()


def stands_alone(module: nn.Module, run: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether a module, in eval, turns each token into a row of one tensor, in company as by itself.

    Args:
        run: calls the module.
        x: hidden states [..., n, d] of a few tokens.

    Cost: a host sync.
    """
    with torch.no_grad(), Ambient.capture(x.device, rng=True).restored(), _evaluating(module):
        together = run(x.contiguous())
        if not isinstance(together, Tensor) or together.shape[:-1] != x.shape[:-1]:
            return False
        alone = torch.cat([run(token.contiguous()) for token in x.split(1, -2)], -2)
    # Roundings of matrix products depend on the number of rows.
    tolerance = 1e-4 if torch.finfo(alone.dtype).bits > 16 else 2**-5
    return bool((together - alone).abs().max() <= tolerance * together.abs().max())


def _check(name: str, module: nn.Module) -> None:
    """Refuse what must not run in tiles, as far as its structure tells."""
    if isinstance(module.__dict__.get("forward"), TiledForward):
        raise ModelError(f"{name} runs in tiles already; call remove() on the handle that tiled_mlp returned for it.")
    inner = [n for n, _ in (*module.named_modules(), *module.named_parameters())]
    if any("expert" in n or "router" in n for n in inner):
        raise ModelError(
            f"{name} holds experts. The statistics of its router would be taken tile by tile and lose their gradients; "
            "tile its experts by themselves with longspan.tile, or let longspan.prepare run whole layers in tiles."
        )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switch dropout off, and back as it was."""
    training = [inner for inner in module.modules() if inner.training]
    module.eval()
    try:
        yield
    finally:
        for inner in training:
            inner.training = True

"""What a layer keeps from forward to backward."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from longspan.errors import ConfigError


class Keep(StrEnum):
    """From the most memory and least work to the least memory and most work.

    graph: the plain layer with all its activations; nothing is computed again.
    products: hidden states, attention's operands and output, and the outputs of the layer's matrix products: only
        elementwise work runs again. Tiles that do not run compiled keep what x_o_kv keeps, and queries.
    x_o_kv: hidden states, attention output and keys and values; the layer runs once more, its attention does not.
    x_o: hidden states and attention output; keys and values are projected again.
    x: hidden states; attention's forward runs again too.
    out: attention output; hidden states are rebuilt, without attention, from the nearest earlier layer that kept them.
    none: nothing; the layer is rebuilt, attention included, from the nearest earlier layer that kept its hidden states.
    """

    GRAPH = "graph"
    PRODUCTS = "products"
    X_O_KV = "x+O+KV"
    X_O = "x+O"
    X = "x"
    OUT = "O"
    NONE = "none"

    @property
    def has_out(self) -> bool:
        """Whether the attention output is kept."""
        return self in (Keep.PRODUCTS, Keep.X_O_KV, Keep.X_O, Keep.OUT)

    @property
    def has_x(self) -> bool:
        """Whether the hidden states are kept."""
        return self in (Keep.PRODUCTS, Keep.X_O_KV, Keep.X_O, Keep.X)

    @property
    def has_kv(self) -> bool:
        """Whether keys and values are kept."""
        return self in (Keep.PRODUCTS, Keep.X_O_KV)

    @property
    def rebuilds(self) -> bool:
        """Whether the hidden states are rebuilt from those of an earlier layer."""
        return self in (Keep.OUT, Keep.NONE)


_RUN = re.compile(r"(.+?)(?:\*([1-9]\d{0,3}))?", re.ASCII)
"""A decision and how many layers it is for."""


def parse_keeps(text: str, separator: str = ",") -> Keep | tuple[Keep, ...]:
    """Read one decision for all layers, or a list with one per layer, in which `x*3` stands for three.

    Raises:
        ConfigError: it cannot be read.
    """
    found: list[Keep] = []
    for part in text.split(separator):
        run = _RUN.fullmatch(part.strip())
        if run is None or run[1] not in tuple(Keep):
            raise ConfigError(f"layers keep one of {', '.join(Keep)}, or a list such as x,none*6; got {text!r}.")
        found += [Keep(run[1])] * int(run[2] or 1)
    return found[0] if text.strip() in tuple(Keep) else tuple(found)


@dataclass(frozen=True)
class Budget:
    """How many bytes of kept tensors each tier may hold, per process; what fits in no tier is refused.

    Args:
        gpu_bytes: on the device itself; None for as many as there are.
        host_bytes: in pinned host memory.
        directory: where what does not fit in host memory is written; None for nowhere.
        moving_bytes: on the device, on their way to other tiers or back; beyond that computing waits for the copies.
            None for what one layer keeps, out, and another, in.
    """

    gpu_bytes: int | None = None
    host_bytes: int = 0
    directory: str | None = None
    moving_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("gpu_bytes", "host_bytes", "moving_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name} must be a number of bytes, 0 or more, got {value!r}.")
        elsewhere = self.host_bytes or self.directory is not None or self.moving_bytes is not None
        if self.gpu_bytes is None and elsewhere:
            raise ConfigError(
                "host_bytes, directory and moving_bytes have no effect without gpu_bytes, as nothing leaves the GPU."
            )


@dataclass(frozen=True)
class Memory:
    """How the layers of a model run.

    Args:
        tile_tokens: tokens of a rank per tile; None for one tile.
        keep: one decision for all layers, or one per layer.
        compile: backend of torch.compile that the layers' halves run through; None runs them as they are.
        rebuilt: what a layer whose attention has run again, so that later layers could be rebuilt, keeps from then to
            its own backward: one decision for all such layers, or one per layer. With `none` it is rebuilt once more
            and then keeps `x+O`. A layer that kept its hidden states goes on keeping them.
        budget: where what is kept may lie.
    """

    tile_tokens: int | None = None
    keep: Keep | tuple[Keep, ...] = Keep.GRAPH
    compile: str | None = None
    rebuilt: Keep | tuple[Keep, ...] = Keep.X_O
    budget: Budget = Budget()

    def of(self, layer: int) -> Keep:
        """Return what a layer keeps; graph beyond the last."""
        if isinstance(self.keep, Keep):
            return self.keep
        return self.keep[layer] if layer < len(self.keep) else Keep.GRAPH

    def again(self, layer: int, keep: Keep) -> Keep:
        """Return what a layer that kept `keep`, and no attention output, keeps after it has been run again."""
        rebuilt = self.rebuilt if isinstance(self.rebuilt, Keep) else self.rebuilt[layer]
        return _WITH_X.get(rebuilt, rebuilt) if keep.has_x else rebuilt

    def with_states(self, layers: range) -> Memory:
        """Return the same, but that these layers keep their hidden states if they keep no graph."""
        if isinstance(self.keep, Keep):  # one that needs another layer's cannot stand for all
            return self
        kept = (_WITH_X.get(keep, keep) if i in layers else keep for i, keep in enumerate(self.keep))
        return replace(self, keep=tuple(kept))

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", _decisions(self.keep))
        object.__setattr__(self, "rebuilt", _decisions(self.rebuilt))
        if self.tile_tokens is not None and (not isinstance(self.tile_tokens, int) or self.tile_tokens < 1):
            raise ConfigError(f"tile_tokens must be at least 1, got {self.tile_tokens}.")
        if self.tile_tokens is None and self.compile is not None:
            raise ConfigError("compile needs tile_tokens: code is compiled for tiles of that size.")
        if Keep.PRODUCTS in (*self.decisions, *_listed(self.rebuilt)) and self.compile is None:
            raise ConfigError("keep 'products' needs compile: products are found in the compiled code.")
        if self.tile_tokens is not None and not self.streams:
            raise ConfigError(
                f"tile_tokens={self.tile_tokens} has no effect on layers that keep their graph and are not compiled: "
                "leave it out, or choose another keep, such as x+O."
            )
        if Keep.GRAPH in _listed(self.rebuilt):
            raise ConfigError("rebuilt cannot be 'graph': layers that are rebuilt keep no graph.")
        before = Keep.GRAPH
        for layer, keep in enumerate(self.decisions):
            if keep.rebuilds and before is Keep.GRAPH:
                raise ConfigError(
                    f"Layer {layer} keeps {'nothing' if keep is Keep.NONE else 'no hidden states'}, but the layer "
                    "before it keeps no hidden states to rebuild it from: start each run of 'none' and 'O' with 'x', "
                    "'x+O' or 'x+O+KV'."
                )
            before = keep

    @property
    def streams(self) -> bool:
        """Whether some layer does not simply run as it is."""
        return self.compile is not None or any(keep is not Keep.GRAPH for keep in self.decisions)

    @property
    def decisions(self) -> tuple[Keep, ...]:
        """All decisions, in order; one that holds for all layers stands alone."""
        return _listed(self.keep)

    def check_layers(self, count: int) -> None:
        """Raise unless there is a decision for each of the model's layers.

        Raises:
            ConfigError: there are more or fewer.
        """
        if not isinstance(self.keep, Keep) and len(self.keep) != count:
            raise ConfigError(f"keep lists {len(self.keep)} decisions, the model has {count} layers.")
        if not isinstance(self.rebuilt, Keep) and len(self.rebuilt) != count:
            raise ConfigError(f"rebuilt lists {len(self.rebuilt)} decisions, the model has {count} layers.")


_WITH_X = {Keep.NONE: Keep.X, Keep.OUT: Keep.X_O}


def _listed(decisions: Keep | tuple[Keep, ...]) -> tuple[Keep, ...]:
    return (decisions,) if isinstance(decisions, Keep) else decisions


def _decisions(keep: Any) -> Keep | tuple[Keep, ...]:
    """Read decisions that may be given by name."""
    try:
        return tuple(Keep(k) for k in keep) if isinstance(keep, tuple | list) else Keep(keep)
    except ValueError:
        raise ConfigError(f"keep must be one of {', '.join(Keep)}, or one of them per layer, got {keep!r}.") from None

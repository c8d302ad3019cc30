"""One way to run one length: everything that bytes and seconds follow from, except what layers keep."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from longspan.comm.heads import HeadSplit
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan.machine import Cluster
from longspan.plan.shapes import LayerShape, ModelShape

ENGINES = ("single", "ddp", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3")

_DIVIDED = {
    "fsdp2": ("parameters", "gradients", "states"),
    "zero-1": ("states",),
    "zero-2": ("gradients", "states"),
    "zero-3": ("parameters", "gradients", "states"),
}
"""What engines divide over all ranks; the others divide nothing."""

RECURRENCE_BYTES = 28
"""Of flash-linear-attention, per number of a recurrence's operands; reckoned from its code, in bf16."""


@dataclass(frozen=True)
class Optimizer:
    """Bytes per trained weight, before any sharding.

    Args:
        weight_bytes: of the weight on the device (frozen weights are held alike).
        gradient_bytes: of its gradient; 0 where the step is taken inside backward, layer by layer.
        state_bytes: of moments on the device.
        host_bytes: of master weights and moments in host memory.
        traffic_bytes: read and written in a step, clipping included.
        standing_bytes: of `gradient_bytes`, what has memory of its own from step to step.
    """

    name: str
    weight_bytes: float
    gradient_bytes: float
    state_bytes: float
    host_bytes: float
    traffic_bytes: float
    standing_bytes: float = 0

    @classmethod
    def adamw(cls, itemsize: int) -> Optimizer:
        """Return AdamW whose gradients and moments have the weights' type."""
        return cls("adamw", itemsize, itemsize, 2 * itemsize, 0, 10 * itemsize)

    @classmethod
    def held(cls, kind: str, trained: int, weights: float, in_backward: bool = False) -> Optimizer:
        """Return an optimizer for weights as a run has them.

        Args:
            trained: bytes of a trained weight.
            weights: bytes per weight, of all weights together.
            in_backward: whether it steps inside backward.
        """
        plain = cls.adamw(trained) if kind == "adamw" else find_optimizer(kind)
        return replace(plain, weight_bytes=weights, gradient_bytes=0 if in_backward else trained)

    @classmethod
    def under_zero(cls, stage: int, itemsize: int, added_up: int = 4) -> Optimizer:
        """Return AdamW as DeepSpeed 0.19 holds it: float32 master weights and moments beside the model's weights.

        Only stage 0 steps float32 weights themselves. Stage 1 adds gradients up in whole buffers that stay, where they
        are of another type than the weights; stage 3 in divided ones that stay. Measured: all tensors, added up.

        Args:
            itemsize: bytes of a weight of the model, and of its gradient as backward makes it.
            added_up: bytes of a gradient that is added up over micro-batches.
        """
        master = 0 if stage == 0 and itemsize == 4 else 4
        if stage == 0:
            gradient, standing = itemsize + master, 0  # float32 gradients are made while it steps
        elif stage == 1:
            standing = added_up if added_up != itemsize else 0
            gradient = itemsize + standing
        else:
            gradient, standing = added_up, added_up if stage == 3 else 0
        return cls("adamw", itemsize, gradient, master + 8, 0, 40 + itemsize, standing)

    @property
    def in_backward(self) -> bool:
        """Whether each parameter is stepped as soon as its gradient is there, which one process alone can do."""
        return self.gradient_bytes == 0


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adamw": Optimizer.adamw(4),
        "adamw-host": Optimizer("adamw-host", 2, 2, 0, 12, 28),
        "adamw8bit": Optimizer("adamw8bit", 4, 4, 2.07, 0, 25),
        "adamw-bf16-sr": Optimizer("adamw-bf16-sr", 2, 2, 4, 0, 20),
    }
)
"""adamw: fp32 weights, gradients and moments. adamw-host: bf16 weights and gradients on the device, fp32 weights and
moments in host memory. adamw8bit: moments of one byte with a scale per block. adamw-bf16-sr: weights and moments in
bf16, rounded stochastically."""

IN_BACKWARD = ("adamw-host", "adamw-bf16-sr")
"""Where there is one process, these step inside backward: both take bf16 parameters and leave them whole."""


def find_optimizer(name: str) -> Optimizer:
    """Return an optimizer by name.

    Raises:
        ConfigError: there is none.
    """
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name, OPTIMIZERS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"Unknown optimizer {name!r}; use auto, {', '.join(OPTIMIZERS)}.{hint}")
    return OPTIMIZERS[name]


@dataclass(frozen=True)
class Setup:
    """A model, a cluster and one length.

    Args:
        engine: who holds parameters.
        kernel: of attention; `auto` for the machine's first.
        itemsize: bytes of an activation.
        compiled: whether full tiles run compiled.
        ulysses, ring: sequence-parallel degrees; the other ranks are data parallel.
        rows: rows of a micro-batch.
        tokens: tokens of a row.
        tile_tokens: tokens of a rank per tile and row; None for one tile.
        streams_norm: whether the last norm runs in tiles as well.
        key_block_tokens: keys that a call of attention's backward takes at most; None for the whole prefix.
        recurrence_bytes: of a recurrence in backward, per number of its operands.
    """

    shape: ModelShape
    cluster: Cluster
    engine: str
    optimizer: Optimizer
    ulysses: int
    ring: int
    tokens: int
    rows: int = 1
    kernel: str = "auto"
    itemsize: int = 2
    compiled: bool = True
    tile_tokens: int | None = None
    streams_norm: bool = False
    key_block_tokens: int | None = None
    recurrence_bytes: int = RECURRENCE_BYTES

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"Unknown engine {self.engine!r}; use {', '.join(ENGINES)}.")

    def shards(self, what: str) -> int:
        """Return how many ranks divide the `parameters`, `gradients` or optimizer `states`."""
        return self.cluster.gpus if what in _DIVIDED.get(self.engine, ()) else 1

    @property
    def gathers(self) -> bool:
        """Whether a layer's parameters are gathered for the time it runs."""
        return "parameters" in _DIVIDED.get(self.engine, ())

    @property
    def data(self) -> int:
        """Data-parallel replicas."""
        return self.cluster.gpus // (self.ulysses * self.ring)

    @cached_property
    def shard_tokens(self) -> int:
        """Tokens of a row that a rank holds."""
        return Layout(self.tokens, self.ring, self.ulysses).shard_tokens

    @property
    def local(self) -> int:
        """Tokens that a rank holds, of all rows."""
        return self.rows * self.shard_tokens

    @property
    def joined(self) -> int:
        """Tokens that an exchange of heads makes of them."""
        return self.local * self.ulysses

    @property
    def tile(self) -> int:
        """Tokens of a tile, of all rows."""
        return self.rows * min(self.tile_tokens or self.shard_tokens, self.shard_tokens)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.local // self.tile)

    def kv_heads(self, layer: LayerShape) -> int:
        """Return the KV heads that the busiest rank works on; of a recurrence its share of tokens times key heads."""
        if layer.recurrent:
            return -(-layer.kv_heads // self.ulysses)
        return max(len(heads) for heads in HeadSplit(layer.heads, layer.kv_heads, self.ulysses).key)

    def query_heads(self, layer: LayerShape) -> int:
        """Return the query heads that the busiest rank works on."""
        return -(-layer.heads // self.ulysses)

"""What the layers of one forward pass keep until its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan.errors import ConfigError
from longspan.keep import Keep, Memory
from longspan.kernels.protocol import wide
from longspan.plan.kept import LayerSize, Operands, Tier, assign, kept_bytes, too_much
from longspan.stream.stash import Stash
from longspan.tiling import Ambient


@dataclass
class Passage:
    """Chooses the tiers of one forward pass, and brings back what a layer's backward needs while the later one runs.

    Args:
        operands: sizes of each layer's attention call.
        ulysses: ranks that exchange heads; `ranks` that share a sequence.
        whole: attention runs once over the sequence, not tile by tile.
    """

    stash: Stash
    memory: Memory
    operands: Sequence[Operands]
    ulysses: int = 1
    whole: bool = False
    ranks: int = 1
    tiers: list[Tier] | None = None
    autocast: torch.dtype | None = None
    needs: dict[int, Callable[[], None]] = field(default_factory=dict)

    def put(self, layer: int, x: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Put what a layer keeps into the tier chosen for it.

        Args:
            x: the layer's hidden states; those of the first layer tell how long they are.
        """
        keep = self.memory.of(layer)
        if self.tiers is None:
            self.autocast = Ambient.capture(x.device, rng=False).autocast_dtype
            self.stash.states = (x.shape[2], x.dtype, self.autocast)
            self.tiers = self.assign(self.sizes(x))
        stood = self.stash.put(tensors, self.tiers[layer])
        if keep is Keep.PRODUCTS:
            self._learn(layer, x, sum(t.nbytes for t in tensors))
        if tensors and _hooked():
            self.stash.finish()
        return stood

    def sizes(self, x: Tensor) -> list[int]:
        """Return the bytes that each layer keeps.

        Raises:
            ConfigError: see `_check_backward`.
        """
        sizes = [self.bytes(i, self.memory.of(i), x) for i in range(len(self.operands))]
        self._check_backward(sizes, x)
        return sizes

    def _check_backward(self, sizes: Sequence[int], x: Tensor) -> None:
        """Refuse budgets that may hold what forward keeps, but not what some layer's backward adds to it.

        A layer whose attention output is not kept makes it again in its backward; one that is rebuilt before that may
        keep more until then. With a ring the output is not put away.

        Raises:
            ConfigError: with the numbers, before anything has run.
        """
        left = self.stash.left()
        if left.gpu_bytes is None or left.directory is not None:
            return
        held = rebuilt = most = 0
        for layer, size in enumerate(sizes):
            keep = self.memory.of(layer)
            held, rebuilt = held + size, rebuilt if keep.rebuilds else 0
            again = 0 if keep.has_out or keep is Keep.GRAPH else self.bytes(layer, Keep.OUT, x)
            most = max(most, held + rebuilt + (0 if self.whole else again))
            if again:
                rebuilt += self.bytes(layer, self.memory.again(layer, keep), x) - size
        if most > left.gpu_bytes + left.host_bytes:
            raise ConfigError(too_much(most, left))

    def assign(self, sizes: Sequence[int]) -> list[Tier]:
        """Choose tiers for what consecutive layers keep, beside what is kept now."""
        return assign(sizes, self.stash.left())

    def expect(self, layer: int, fetch: Callable[[], None]) -> None:
        """Remember how to start bringing back what a layer's backward needs first."""
        self.needs[layer] = fetch

    def ahead(self, layer: int) -> None:
        """Start bringing back what the nearest layer before this one needs."""
        before = [i for i in self.needs if i < layer]
        if before:
            self.needs[max(before)]()

    def bytes(self, layer: int, keep: Keep, x: Tensor) -> int:
        """Return how much a layer keeps under a decision, on the rank that keeps most: all ranks decide alike.

        Args:
            x: [B, s, d], like the layer's hidden states.
        """
        dtype = x.dtype if self.autocast is None else self.autocast
        size = LayerSize(
            tokens=x.shape[0] * x.shape[1],
            hidden=x.shape[2],
            operands=self.operands[layer],
            itemsize=dtype.itemsize,
            x_itemsize=x.itemsize,
            lse_itemsize=wide(dtype).itemsize,
            ulysses=self.ulysses,
            whole=self.whole,
            ranks=self.ranks,
        )
        products = self.stash.products
        per_token = products.get(layer, max(products.values(), default=0.0)) if keep is Keep.PRODUCTS else 0.0
        return kept_bytes(keep, size) + int(size.tokens * per_token)

    def _learn(self, layer: int, x: Tensor, kept: int) -> None:
        """Remember how wide a layer's products are, for the passes after this one."""
        self.stash.products[layer] = 0.0
        self.stash.products[layer] = (kept - self.bytes(layer, Keep.PRODUCTS, x)) / (x.shape[0] * x.shape[1])


def _hooked() -> bool:
    """Whether hooks will be shown the tensors that are saved, and may read them."""
    top = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
    return top(True) is not None

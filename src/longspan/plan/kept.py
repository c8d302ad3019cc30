"""Bytes of what a layer keeps, and the tier each layer's share goes to. Pure: shapes and numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from longspan.comm.heads import HeadSplit
from longspan.comm.regroup import groups_of
from longspan.errors import ConfigError
from longspan.keep import Budget, Keep


class Tier(StrEnum):
    """Where kept tensors lie, from the fastest to the slowest."""

    GPU = "gpu"
    HOST = "host"
    FILE = "file"


class Operands(Protocol):
    """Sizes of a layer's attention call, or of its recurrent mixer: value heads, and key heads as KV heads."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def recurrent(self) -> bool: ...


@dataclass(frozen=True)
class LayerSize:
    """What decides how many bytes a layer keeps.

    Args:
        tokens: of this rank, over all rows, padding included.
        itemsize: bytes per element of q, k, v and the attention output; `x_itemsize` of the hidden states.
        ulysses: ranks that exchange heads; `ranks` that share a sequence, among which recurrences divide theirs.
        rank: which of them; None for the one that keeps most, as heads may be divided unevenly.
        whole: attention runs once over the whole sequence (with a ring), not tile by tile.
        products: numbers per token in the results of matrix products that backward needs; 0 where not known.
    """

    tokens: int
    hidden: int
    operands: Operands
    itemsize: int
    x_itemsize: int
    lse_itemsize: int = 4
    ulysses: int = 1
    rank: int | None = None
    whole: bool = False
    products: int = 0
    ranks: int = 1


def kept_bytes(keep: Keep, size: LayerSize) -> int:
    """Return the bytes of all tensors that a layer keeps from forward to backward, but for the outputs of products,
    whose widths are not known here; 0 for `graph`, whose tensors are autograd's.

    After the exchange a rank has `ulysses` times its tokens and a part of the heads; a KV head that several ranks need
    counts on each of them.
    """
    if keep is Keep.GRAPH:
        return 0
    if size.operands.recurrent:
        return _recurrent_bytes(keep, size)
    o = size.operands
    split, joined = HeadSplit(o.heads, o.kv_heads, size.ulysses), size.tokens * size.ulysses
    ranks = slice(None) if size.rank is None else slice(size.rank, size.rank + 1)
    heads, kv_heads = (max(len(part) for part in parts[ranks]) for parts in (split.query, split.key))
    total = 0
    if keep.has_x:
        total += size.tokens * size.hidden * size.x_itemsize
    if keep.has_out:
        total += size.tokens * o.heads * o.v_head_dim * size.itemsize + joined * heads * size.lse_itemsize
    if keep.has_kv:
        total += joined * kv_heads * (o.head_dim + o.v_head_dim) * size.itemsize
    if keep is Keep.PRODUCTS or (keep.has_kv and size.whole):
        total += joined * heads * o.head_dim * size.itemsize
    if keep is Keep.PRODUCTS:
        total += size.tokens * size.products * size.itemsize
    return total


def _recurrent_bytes(keep: Keep, size: LayerSize) -> int:
    """Return the bytes that a layer with a recurrent mixer keeps on the rank that keeps most, but for the few tokens
    before its stretch."""
    o = size.operands
    total = size.tokens * size.hidden * size.x_itemsize if keep.has_x else 0
    if keep.has_out:
        total += size.tokens * o.heads * o.v_head_dim * size.itemsize
    if keep.has_kv:
        total += size.tokens * most_key_heads(o, size.ranks) * recurrent_features(o) * size.itemsize
    return total + (size.tokens * size.products * size.itemsize if keep is Keep.PRODUCTS else 0)


def most_key_heads(o: Operands, ranks: int) -> int:
    """Return the most key heads that a rank's recurrence works on per token of its shard: over `groups` ranks, which
    divide the heads, it has `groups` times its tokens with a part of the heads."""
    groups = groups_of(o.kv_heads, ranks)
    return groups * -(-o.kv_heads // groups)


def recurrent_features(o: Operands) -> int:
    """Return how many numbers per token and key head a recurrent mixer works on."""
    return 2 * o.head_dim + o.heads // o.kv_heads * (o.v_head_dim + 2)


def assign(sizes: Sequence[int], budget: Budget) -> list[Tier]:
    """Choose a tier for what each of consecutive layers keeps, see `divide`."""
    return [tier for tier, _ in divide(sizes, budget)]


def divide(sizes: Sequence[int], budget: Budget) -> list[tuple[Tier, dict[Tier, float]]]:
    """Choose a tier for what each of consecutive layers keeps, given bytes per layer in the order of forward; return it
    with the bytes that lie in each tier, as what does not fit goes on to others.

    Backward needs the last layers first and soon, so they get the fastest tier with room left, and only what does not
    fit leaves for a slower one. A layer that fits into no tier as a whole is divided, from the slowest on.

    Args:
        budget: what may still be used.

    Raises:
        ConfigError: some layer does not fit.
    """
    left: dict[Tier, float] = {Tier.GPU: math.inf if budget.gpu_bytes is None else budget.gpu_bytes}
    left[Tier.HOST] = budget.host_bytes
    if budget.directory is not None:
        left[Tier.FILE] = math.inf
    chosen = []
    for size in reversed(sizes):
        if size > sum(left.values()):
            raise ConfigError(too_much(sum(sizes), budget))
        whole = next((tier for tier, room in left.items() if size <= room), None)
        tier = next(tier for tier, room in reversed(left.items()) if room > 0) if whole is None else whole
        taken, rest = dict.fromkeys(left, 0.0), float(size)
        for each in [tier, *left]:
            taken[each] += (part := min(rest, left[each]))
            left[each], rest = left[each] - part, rest - part
        chosen.append((tier, taken))
    return chosen[::-1]


def too_much(wanted: int, left: Budget) -> str:
    """Say that budgets do not hold what layers keep, by how much, and what to do."""
    gpu, host = left.gpu_bytes or 0, left.host_bytes
    missing = wanted - gpu - host
    short = f"{_gib(missing)} are missing" if missing > 0 else "neither has room for all that one layer keeps"
    return (
        f"The layers keep {_gib(wanted)} for backward, but gpu_bytes has {_gib(gpu)} left and host_bytes "
        f"{_gib(host)}: {short}. Raise host_bytes, name a directory for the rest, or let layers keep less."
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.3f} GiB" if count >= 2**20 else f"{count} bytes"

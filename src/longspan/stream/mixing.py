"""The tiles of a layer one after the other, each attending to those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attention.call import Request
from longspan.batch import Shard
from longspan.comm.pending import Pending
from longspan.keep import Keep
from longspan.plan.kept import Tier
from longspan.stream.attending import AttendIn, Attending
from longspan.stream.function import Mixing
from longspan.stream.gradients import Gradients
from longspan.stream.prefix import Prefix
from longspan.stream.run import LayerRun, TileBackward
from longspan.stream.settings import as_then
from longspan.stream.stash import Stash


class PrefixMixing(Mixing):
    """Tiles in order, each attending to what came before: one pass per tile, forward and backward.

    Where the layer's halves are compiled, a tile's exchanges travel while its neighbours compute. What enters attention
    is borrowed from the exchange unless it is kept: at most one more exchange that is borrowed from starts before the
    tile's attention has read it.

    Cost: a tile runs once in forward and once in backward, plus the projection of its keys and values if they are not
    kept, and attention's forward if its output is not. Per tile two exchanges in forward and two or three in backward.
    """

    by_tile = True

    def __init__(self, run: LayerRun, attend_in: AttendIn, shard: Shard, stash: Stash) -> None:
        self.run, self.attend_in, self.shard, self.stash = run, attend_in, shard, stash
        self.known: Attending | None = None
        self.counts: list[int] = []  # of the products that each tile keeps

    @as_then
    def forward(self, x: Tensor, y: Tensor | None, keep: Keep) -> tuple[Tensor, ...]:
        """Fill y; return k and v, out and lse of each tile, q and the products of each tile, where they are kept."""
        walk = _Forward(self, x, y, keep)
        if self.run.splits:
            walk.ahead()
        else:
            walk.in_turn()
        if keep is Keep.PRODUCTS:
            self.counts = [len(products) for products in walk.products] or [0] * len(walk.queries)
        products = (product for products in walk.products for product in products)
        return (*(walk.prefix.keys_values() if keep.has_kv else ()), *walk.kept, *walk.queries, *products)

    @as_then
    def replay(self, x: Tensor, kept: tuple[Tensor, ...], y: Tensor) -> None:
        """Fill y from the kept attention output."""
        outs = [(out,) for out, _ in self._kept(kept).results]
        for index, at in enumerate(self.run.tiles):
            (out,) = self.stash.get(outs[index])
            self.stash.fetcher(outs[index + 1] if index + 1 < len(outs) else ())()
            y[:, at.start : at.stop] = self.run.after(index, x[:, at.start : at.stop], out)[0]

    @as_then
    def backward(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep, gradients: Gradients) -> None:
        """Take the tiles in descending order, so that a tile's dk and dv are final at its turn."""
        walk = _Backward(self, *self._restore(x, self._kept(kept), keep), gradients)
        del kept
        last = len(self.run.tiles) - 1
        if not self.run.splits:
            for index in range(last, -1, -1):
                walk.after(index)
                walk.attend(index)
                walk.before(index)
            return
        walk.after(last)
        for index in range(last, -1, -1):
            if index > 0:
                walk.after(index - 1)  # while the operands of this tile's attention travel
            walk.attend(index)
            if index < last:
                walk.before(index + 1)  # its gradients have travelled meanwhile
        walk.before(0)

    @property
    def attending(self) -> Attending:
        """How the layer attends, after its first tile."""
        assert self.known is not None
        return self.known

    def learn(self, request: Request) -> Attending:
        """Return how the layer attends, given the call of a tile."""
        self.known = self.known or Attending.of(request, self.attend_in(request), self.shard, whole=False)
        return self.known

    def new_prefix(self) -> Prefix:
        """Return empty keys and values."""
        how = self.attending
        return Prefix(how.ulysses, how.attend.kernel, how.shard.tiles, how.shard.layout.length)

    def _kept(self, kept: tuple[Tensor, ...]) -> _Kept:
        """Sort what `forward` returned."""
        count, rest = len(self.run.tiles), list(kept)
        products = [[rest.pop() for _ in range(n)][::-1] for n in reversed(self.counts)][::-1]
        queries = [rest.pop() for _ in self.counts][::-1]
        results = [(rest[i], rest[i + 1]) for i in range(len(rest) - 2 * count, len(rest), 2)] if rest else []
        return _Kept(rest[: -2 * count], results, queries, products)

    def _restore(self, x: Tensor, kept: _Kept, keep: Keep) -> tuple[Prefix, _Kept]:
        """Return the layer's keys and values, and what is known of each tile, out and lse at least."""
        if keep.has_kv:
            prefix = self.new_prefix()
            prefix.k, prefix.v = self.stash.get(kept.keys_values)
            kept.keys_values.clear()
            return prefix, kept
        with torch.no_grad():
            if not keep.has_out:
                walk = _Forward(self, x, None, Keep.X_O, self.stash)
                walk.in_turn()
                self.stash.settle()
                return walk.prefix, self._kept(tuple(walk.kept))
            prefix = self.new_prefix()
            for index, at in enumerate(self.run.tiles):
                request = self.run.before(index, x[:, at.start : at.stop], "kv")
                prefix.append(index, *prefix.ulysses.enter_keys(*request.keys(), borrow=True).wait())
        return prefix, kept


@dataclass
class _Kept:
    """What a prefix layer keeps besides its hidden states.

    Args:
        keys_values: k and v, or nothing.
        results: out and lse of each tile.
        queries: q of each tile, as its attention saw it, or nothing.
        products: of each tile, or nothing.
    """

    keys_values: list[Tensor]
    results: list[tuple[Tensor, Tensor]]
    queries: list[Tensor]
    products: list[list[Tensor]]

    def last(self) -> list[Tensor]:
        """Return all that is known of the last tile left: out and lse, and q and products if they are kept."""
        if not self.results:
            return []
        return [*self.results[-1], *self.queries[-1:], *(self.products[-1] if self.products else ())]

    def pop(self) -> list[Tensor]:
        """Return it, and hold it no longer."""
        last = self.last()
        for parts in (self.results, self.queries, self.products):
            if parts:
                parts.pop()
        return last


class _Forward:
    """One walk over the tiles of a layer: each is projected, exchanged, attends, is exchanged back, and finished.

    Args:
        stash: where each tile's attention output goes at once; None to keep all of them as they are.
    """

    prefix: Prefix

    def __init__(
        self, mixing: PrefixMixing, x: Tensor, y: Tensor | None, keep: Keep, stash: Stash | None = None
    ) -> None:
        self.mixing, self.run, self.x, self.y, self.keep, self.stash = mixing, mixing.run, x, y, keep, stash
        self.kept: list[Tensor] = []
        self.queries: list[Tensor] = []
        self.products: list[list[Tensor]] = []

    def in_turn(self) -> None:
        """Take one tile after the other."""
        for index, at in enumerate(self.run.tiles):

            def answer(request: Request, index: int = index) -> Tensor:
                return self._attend(index, self._send(index, request)).wait()

            if self.y is None:
                answer(self.run.before(index, self._tile(index)))
            else:
                self.y[:, at.start : at.stop] = self.run.through(index, self._tile(index), answer)

    def ahead(self) -> None:
        """Project the next tile and finish the last one while a tile's operands and its output travel."""
        count = len(self.run.tiles)
        coming = self._send(0, self.run.before(0, self._tile(0)))
        leaving: Pending[Tensor] | None = None
        for index in range(count):
            current = coming
            if index + 1 < count:
                coming = self._send(index + 1, self.run.before(index + 1, self._tile(index + 1)))
            out = self._attend(index, current)
            if leaving is not None:
                self._finish(index - 1, leaving)
            leaving = out
        assert leaving is not None
        self._finish(count - 1, leaving)

    def _tile(self, index: int) -> Tensor:
        at = self.run.tiles[index]
        return self.x[:, at.start : at.stop]

    def _send(self, index: int, request: Request) -> Pending[list[Tensor]]:
        q, k, v = request.operands()
        exchange = self.mixing.learn(request).ulysses
        if index == 0:
            self.prefix = self.mixing.new_prefix()
        return exchange.enter(q, k, v, borrow=self.keep is not Keep.PRODUCTS)

    def _attend(self, index: int, coming: Pending[list[Tensor]]) -> Pending[Tensor]:
        """Add a tile to the prefix and attend; its output is on its way back to the ranks of its tokens."""
        q, k, v = coming.wait()
        self.prefix.append(index, k, v)
        out, lse = self.prefix.forward(index, q, self.mixing.attending.score)
        lse = self.mixing.attending.absorb_(out, lse)
        if self.keep is Keep.PRODUCTS:
            self.queries.append(q)
        leaving = self.prefix.ulysses.leave(out)
        return leaving.then(lambda out: self._keep(out, lse)) if self.keep.has_out else leaving

    def _keep(self, out: Tensor, lse: Tensor) -> Tensor:
        self.kept.extend((out, lse) if self.stash is None else self.stash.put((out, lse), Tier.GPU))
        return out

    def _finish(self, index: int, leaving: Pending[Tensor]) -> None:
        out, at = leaving.wait(), self.run.tiles[index]
        if self.y is None:
            return
        if self.keep is Keep.PRODUCTS:
            y, products = self.run.after_keeping(index, self._tile(index), out)
            self.products.append(products)
        else:
            y = self.run.after(index, self._tile(index), out)[0]
        self.y[:, at.start : at.stop] = y


class _Backward:
    """The three steps of each tile's backward, with what travels between them."""

    def __init__(self, mixing: PrefixMixing, prefix: Prefix, kept: _Kept, gradients: Gradients) -> None:
        self.run, self.prefix, self.kept, self.gradients = mixing.run, prefix, kept, gradients
        self.attending, self.stash = mixing.attending, mixing.stash
        self.queries = bool(kept.queries)
        self.tiles: dict[int, TileBackward] = {}
        self.coming: dict[int, tuple[Pending[list[Tensor]], Tensor]] = {}
        self.leaving: dict[int, tuple[Pending[Any], Tensor | None]] = {}

    def after(self, index: int) -> None:
        """Differentiate what follows the tile's attention; send off what its attention's backward needs."""
        out, lse, *rest = self.stash.get(self.kept.pop())
        self.stash.fetcher(self.kept.last())()
        q, products = (rest[:1], rest[1:]) if self.queries else ([], [])
        tile = self.tiles[index] = self.run.backward(index, self.gradients, products)
        dout = tile.after(out, hold=True).to(out.dtype)
        enter = self.prefix.ulysses.enter_queries
        if q:
            coming = enter(out, dout, borrow=True).then(lambda parts: [*q, *parts])
        else:
            coming = enter(tile.query().query().detach(), out, dout, borrow=True)
        self.coming[index] = coming, lse

    def attend(self, index: int) -> None:
        """Differentiate the tile's attention; send its gradients back."""
        coming, lse = self.coming.pop(index)
        q, out, dout = coming.wait()
        parts = self.prefix.backward(index, dout, q, out, lse, self.attending.score)
        leaving = self.prefix.ulysses.leave_gradients(*(part.to(q.dtype) for part in parts))
        self.leaving[index] = leaving, self.attending.sinks_gradient(dout, out, lse)

    def before(self, index: int) -> None:
        """Differentiate what comes before the tile's attention."""
        leaving, d_sinks = self.leaving.pop(index)
        dqkv = leaving.wait()
        dtype = dqkv[0].dtype
        shared = () if d_sinks is None else (d_sinks,)
        self.tiles.pop(index).before([part.to(dtype) for part in dqkv], shared)

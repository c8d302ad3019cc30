"""The two ways in which the tiles of a layer attend to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.attention.build import Attend
from longspan.attention.call import Request
from longspan.attention.ring import Ring
from longspan.attention.schedule import Schedule
from longspan.attention.ulysses import Ulysses
from longspan.comm.pending import Pending
from longspan.plan.keep import Keep
from longspan.stream.function import Gradients, LayerRun, Mixing, TileBackward
from longspan.stream.prefix import Prefix, Tiles


class PrefixMixing(Mixing):
    """Tiles in order, each attending to what came before: one pass per tile, forward and backward.

    Where the layer's halves are compiled, a tile's exchanges travel while its neighbours compute.

    Cost: a tile runs once in forward and once in backward, plus the projection of its keys and values if they are not
    kept, and attention's forward if its output is not. Per tile two exchanges in forward and two or three in backward.
    """

    def __init__(self, run: LayerRun, attend: Attend, tiles: Tiles, length: int) -> None:
        self.run, self.attend, self.tiles, self.length = run, attend, tiles, length
        self.ulysses: Ulysses | None = None

    def forward(self, x: Tensor, y: Tensor | None, keep: Keep) -> tuple[Tensor, ...]:
        """Fill y; return k and v if they are kept, then out and lse of each tile if they are."""
        walk = _Forward(self, x, y, keep.has_out)
        if self.run.splits and self.attend.mesh.ulysses.size > 1:
            walk.ahead()
        else:
            walk.in_turn()
        return (*(walk.prefix.keys_values() if keep is Keep.X_O_KV else ()), *walk.kept)

    def replay(self, x: Tensor, kept: tuple[Tensor, ...], y: Tensor) -> None:
        """Fill y from the kept attention output."""
        outs = kept[-2 * len(self.run.tiles) :: 2]
        for index, (at, out) in enumerate(zip(self.run.tiles, outs, strict=True)):
            y[:, at.start : at.stop] = self.run.after(index, x[:, at.start : at.stop], out)[0]

    def backward(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep, gradients: Gradients) -> None:
        """Take the tiles in descending order, so that a tile's dk and dv are final at its turn."""
        prefix, results = self._restore(x, kept, keep)
        walk = _Backward(self, prefix, results, gradients)
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

    def exchange(self, q: Tensor, k: Tensor) -> Ulysses:
        """Return the layer's head exchange, known from its first tile on."""
        self.ulysses = self.ulysses or self.attend.ulysses(q, k)
        return self.ulysses

    def new_prefix(self) -> Prefix:
        """Return empty keys and values."""
        assert self.ulysses is not None
        return Prefix(self.ulysses, self.attend.kernel, self.tiles, self.length)

    def _restore(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep) -> tuple[Prefix, list[tuple[Tensor, Tensor]]]:
        """Return the layer's keys and values, and out and lse of each tile."""
        if keep is Keep.X_O_KV:
            prefix = self.new_prefix()
            prefix.k, prefix.v, *rest = kept
            return prefix, list(zip(rest[::2], rest[1::2], strict=True))
        with torch.no_grad():
            if not keep.has_out:
                walk = _Forward(self, x, None, keeps_out=True)
                walk.in_turn()
                return walk.prefix, list(zip(walk.kept[::2], walk.kept[1::2], strict=True))
            prefix = self.new_prefix()
            for index, at in enumerate(self.run.tiles):
                request = self.run.before(index, x[:, at.start : at.stop], "kv")
                prefix.append(index, *prefix.ulysses.enter_keys(*request.keys()).wait())
        return prefix, list(zip(kept[::2], kept[1::2], strict=True))


class _Forward:
    """One walk over the tiles of a layer: each is projected, exchanged, attends, is exchanged back, and finished."""

    prefix: Prefix

    def __init__(self, mixing: PrefixMixing, x: Tensor, y: Tensor | None, keeps_out: bool) -> None:
        self.mixing, self.run, self.x, self.y, self.keeps_out = mixing, mixing.run, x, y, keeps_out
        self.kept: list[Tensor] = []
        self.scale = 0.0

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
        exchange = self.mixing.exchange(q, k)
        if index == 0:
            self.prefix = self.mixing.new_prefix()
        self.scale = request.scale
        return exchange.enter(q, k, v)

    def _attend(self, index: int, coming: Pending[list[Tensor]]) -> Pending[Tensor]:
        """Add a tile to the prefix and attend; its output is on its way back to the ranks of its tokens."""
        q, k, v = coming.wait()
        self.prefix.append(index, k, v)
        out, lse = self.prefix.forward(index, q, self.scale)
        leaving = self.prefix.ulysses.leave(out)
        return leaving.then(lambda out: self._keep(out, lse)) if self.keeps_out else leaving

    def _keep(self, out: Tensor, lse: Tensor) -> Tensor:
        self.kept.extend((out, lse))
        return out

    def _finish(self, index: int, leaving: Pending[Tensor]) -> None:
        out, at = leaving.wait(), self.run.tiles[index]
        if self.y is not None:
            self.y[:, at.start : at.stop] = self.run.after(index, self._tile(index), out)[0]


class _Backward:
    """The three steps of each tile's backward, with what travels between them."""

    def __init__(
        self, mixing: PrefixMixing, prefix: Prefix, results: list[tuple[Tensor, Tensor]], gradients: Gradients
    ) -> None:
        self.run, self.prefix, self.results, self.gradients = mixing.run, prefix, results, gradients
        self.tiles: dict[int, TileBackward] = {}
        self.coming: dict[int, tuple[Pending[list[Tensor]], Tensor, float]] = {}
        self.leaving: dict[int, Pending[Any]] = {}

    def after(self, index: int) -> None:
        """Differentiate what follows the tile's attention; send off what its attention's backward needs."""
        out, lse = self.results.pop()
        tile = self.tiles[index] = self.run.backward(index, self.gradients)
        dout = tile.after(out, hold=True)
        request = tile.query()
        operands = self.prefix.ulysses.enter_queries(request.query().detach(), out, dout.to(out.dtype))
        self.coming[index] = operands, lse, request.scale

    def attend(self, index: int) -> None:
        """Differentiate the tile's attention; send its gradients back."""
        coming, lse, scale = self.coming.pop(index)
        q, out, dout = coming.wait()
        parts = self.prefix.backward(index, dout, q, out, lse, scale)
        self.leaving[index] = self.prefix.ulysses.leave_gradients(*(part.to(q.dtype) for part in parts))

    def before(self, index: int) -> None:
        """Differentiate what comes before the tile's attention."""
        dqkv = self.leaving.pop(index).wait()
        dtype = dqkv[0].dtype
        self.tiles.pop(index).before([part.to(dtype) for part in dqkv])


class WholeMixing(Mixing):
    """Capture every tile, attend over the whole sequence, inject every tile: serves any exchange.

    Cost: a tile runs up to its attention twice in forward (the second time without it), and three times in backward.
    """

    def __init__(self, run: LayerRun, attend: Attend, schedule: Schedule) -> None:
        self.run, self.attend, self.schedule = run, attend, schedule
        self.ring = Ring(attend.kernel, attend.mesh.ring)
        self.scale = 0.0
        self.ulysses: Ulysses | None = None

    def forward(self, x: Tensor, y: Tensor | None, keep: Keep) -> tuple[Tensor, ...]:
        """Fill y; return q, k and v of this rank's heads if kept, then out of its tokens and lse if kept."""
        first = self.ulysses is None
        qkv = self._capture(x)
        out, lse = self._attend(*qkv)
        if y is not None:
            if first:  # when it is rebuilt, each tile finds the random numbers of its first run
                self.run.rewind()
            self.replay(x, (out, lse), y)
        return (*(qkv if keep is Keep.X_O_KV else ()), *((out, lse) if keep.has_out else ()))

    def replay(self, x: Tensor, kept: tuple[Tensor, ...], y: Tensor) -> None:
        """Fill y from the kept attention output."""
        out = kept[-2]
        for index, at in enumerate(self.run.tiles):
            y[:, at.start : at.stop] = self.run.after(index, x[:, at.start : at.stop], out[:, at.start : at.stop])[0]

    def backward(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep, gradients: Gradients) -> None:
        """Inject with gradients, differentiate attention, capture with gradients."""
        ulysses, run = self.ulysses, self.run
        assert ulysses is not None
        with torch.no_grad():
            q, k, v = kept[:3] if keep is Keep.X_O_KV else self._capture(x)
            out, lse = kept[-2:] if keep.has_out else self._attend(q, k, v)
        dout = torch.empty_like(out)
        for index, at in enumerate(run.tiles):
            dout[:, at.start : at.stop] = run.backward(index, gradients).after(out[:, at.start : at.stop], hold=False)
        out, dout = ulysses.enter_queries(out, dout).wait()
        saved = (q, ulysses.expand(k), ulysses.expand(v), out, lse)
        dq, dk, dv = self.ring.backward(dout, saved, self.schedule, self.scale)
        parts = (dq, ulysses.contract(dk), ulysses.contract(dv))
        dqkv = ulysses.leave_gradients(*(part.to(q.dtype) for part in parts)).wait()
        out_dtype = q.dtype
        del q, k, v, out, dout, saved, dq, dk, dv, parts
        for index, at in enumerate(run.tiles):
            run.backward(index, gradients).before([part[:, at.start : at.stop].to(out_dtype) for part in dqkv])

    def _capture(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of all tokens and this rank's heads."""
        parts = []
        for index, at in enumerate(self.run.tiles):
            request = self.run.before(index, x[:, at.start : at.stop])
            self.scale = request.scale
            parts.append(request.operands())
        q, k, v = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
        self.ulysses = self.attend.ulysses(q, k, self.schedule.parts)
        q, k, v = self.ulysses.enter(q, k, v).wait()
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend over the whole sequence -> out of this rank's tokens, lse of its heads."""
        assert self.ulysses is not None
        out, lse = self.ring.forward(q, self.ulysses.expand(k), self.ulysses.expand(v), self.schedule, self.scale)
        return self.ulysses.leave(out).wait(), lse

"""The two ways in which the tiles of a layer attend to each other."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attention.build import Attend
from longspan.attention.call import Request
from longspan.attention.ring import Ring
from longspan.attention.schedule import Schedule
from longspan.attention.ulysses import Ulysses
from longspan.stream.function import Gradients, LayerRun, Mixing
from longspan.stream.keep import Keep
from longspan.stream.prefix import Prefix, Tiles


class PrefixMixing(Mixing):
    """Tiles in order, each attending to what came before: one pass per tile, forward and backward.

    Cost: a tile runs once in forward and once in backward, plus the projection of its keys and values if they are not
    kept, and attention's forward if its output is not. Per tile two exchanges in forward and two or three in backward.
    """

    def __init__(self, run: LayerRun, attend: Attend, tiles: Tiles, length: int) -> None:
        self.run, self.attend, self.tiles, self.length = run, attend, tiles, length
        self.ulysses: Ulysses | None = None

    def forward(self, x: Tensor, y: Tensor | None, keep: Keep) -> tuple[Tensor, ...]:
        """Fill y; return k and v if they are kept, then out and lse of each tile if they are."""
        prefix: list[Prefix] = []
        kept: list[Tensor] = []

        def answer(request: Request) -> Tensor:
            out, lse = self._attend(request, index, prefix)
            if keep.has_out:
                kept.extend((out, lse))
            return out

        for index, at in enumerate(self.run.tiles):
            tile = x[:, at.start : at.stop]
            if y is None:
                answer(self.run.before(index, tile))
            else:
                y[:, at.start : at.stop] = self.run.through(index, tile, answer)
        return (*(prefix[0].keys_values() if keep is Keep.X_O_KV else ()), *kept)

    def replay(self, x: Tensor, kept: tuple[Tensor, ...], y: Tensor) -> None:
        """Fill y from the kept attention output."""
        outs = kept[-2 * len(self.run.tiles) :: 2]
        for index, (at, out) in enumerate(zip(self.run.tiles, outs, strict=True)):
            y[:, at.start : at.stop] = self.run.after(index, x[:, at.start : at.stop], out)[0]

    def backward(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep, gradients: Gradients) -> None:
        """Take the tiles in descending order, so that a tile's dk and dv are final at its turn."""
        prefix, results = self._restore(x, kept, keep)
        ulysses = prefix.ulysses
        for index in reversed(range(len(self.run.tiles))):
            out, lse = results.pop()
            tile = self.run.backward(index, gradients)
            dout = tile.after(out, hold=True)
            request = tile.query()
            q, out, dout = ulysses.enter_queries(request.query().detach(), out, dout.to(out.dtype))
            parts = prefix.backward(index, dout, q, out, lse, request.scale)
            dqkv = ulysses.leave_gradients(*(part.to(q.dtype) for part in parts))
            tile.before([part.to(q.dtype) for part in dqkv])

    def _restore(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep) -> tuple[Prefix, list[tuple[Tensor, Tensor]]]:
        """Return the layer's keys and values, and out and lse of each tile."""
        assert self.ulysses is not None
        prefix = [Prefix(self.ulysses, self.attend.kernel, self.tiles, self.length)]
        if keep is Keep.X_O_KV:
            prefix[0].k, prefix[0].v, *rest = kept
            return prefix[0], list(zip(rest[::2], rest[1::2], strict=True))
        results = list(zip(kept[::2], kept[1::2], strict=True))
        with torch.no_grad():
            for index, at in enumerate(self.run.tiles):
                request = self.run.before(index, x[:, at.start : at.stop], "kv" if keep.has_out else "qkv")
                if keep.has_out:
                    prefix[0].append(index, *self.ulysses.enter_keys(*request.keys()))
                else:
                    results.append(self._attend(request, index, prefix))
        return prefix[0], results

    def _attend(self, request: Request, index: int, prefix: list[Prefix]) -> tuple[Tensor, Tensor]:
        """Exchange a tile, add it to the prefix and attend -> out of this rank's tokens, lse of its heads."""
        q, k, v = request.operands()
        if not prefix:
            self.ulysses = self.attend.ulysses(q, k)
            prefix.append(Prefix(self.ulysses, self.attend.kernel, self.tiles, self.length))
        q, k, v = prefix[0].ulysses.enter(q, k, v)
        prefix[0].append(index, k, v)
        out, lse = prefix[0].forward(index, q, request.scale)
        return prefix[0].ulysses.leave(out), lse


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
        qkv = self._capture(x)
        out, lse = self._attend(*qkv)
        if y is not None:
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
        out, dout = ulysses.enter_queries(out, dout)
        saved = (q, ulysses.expand(k), ulysses.expand(v), out, lse)
        dq, dk, dv = self.ring.backward(dout, saved, self.schedule, self.scale)
        parts = (dq, ulysses.contract(dk), ulysses.contract(dv))
        dqkv = ulysses.leave_gradients(*(part.to(q.dtype) for part in parts))
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
        return self.ulysses.enter(q, k, v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend over the whole sequence -> out of this rank's tokens, lse of its heads."""
        assert self.ulysses is not None
        out, lse = self.ring.forward(q, self.ulysses.expand(k), self.ulysses.expand(v), self.schedule, self.scale)
        return self.ulysses.leave(out), lse

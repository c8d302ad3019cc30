"""Layers whose tiles run up to their mixer, which then runs once over the whole sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.batch import Shard
from longspan.keep import Keep
from longspan.recurrent.build import Recurrent, Share
from longspan.recurrent.call import DeltaNet
from longspan.stream.attending import AttendIn, Attending
from longspan.stream.function import Mixing
from longspan.stream.gradients import Gradients
from longspan.stream.run import LayerRun
from longspan.stream.settings import as_then
from longspan.stream.stash import Stash

Operands = tuple[Tensor, ...]
"""What a mixer works on, of this rank's heads."""


class WholeMixing(Mixing):
    """Capture every tile, mix over the whole sequence, inject every tile: serves any mixer.

    Cost: a tile runs up to its mixer twice in forward (the second time without it), and three times in backward.
    """

    by_tile = False
    operands: int
    """How many tensors a mixer works on; `results`: how many it returns that its backward needs, out first."""
    results: int

    def __init__(self, run: LayerRun, stash: Stash) -> None:
        self.run, self.stash = run, stash
        self.counts: list[int] = []  # of the products that each tile keeps
        self.began = False

    @abstractmethod
    def capture(self, x: Tensor) -> Operands:
        """Run all tiles up to the mixer; return what it works on."""

    @abstractmethod
    def mix(self, operands: Operands) -> tuple[Tensor, ...]:
        """Run the mixer -> out [B, s, H, Dv] of this rank's tokens, and what else its backward needs."""

    @abstractmethod
    def differentiate(self, dout: Tensor, operands: Operands, results: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
        """Return gradients of what tiles hand to the mixer, [B, s, ...] each, and of what all tiles share."""

    @as_then
    def forward(self, x: Tensor, y: Tensor | None, keep: Keep) -> tuple[Tensor, ...]:
        """Fill y; return the products of tiles, then what the mixer works on, then what it returned, as far as kept."""
        first, self.began = not self.began, True
        operands = self.capture(x)
        results = self.mix(operands)
        products: list[Tensor] = []
        if y is not None:
            if first:  # when it is rebuilt, each tile finds the random numbers of its first run
                self.run.rewind()
            if keep is Keep.PRODUCTS:
                products = self._finish(x, results[0], y)
            else:
                self._inject(x, results[0], y)
        return (*products, *(operands if keep.has_kv else ()), *(results if keep.has_out else ()))

    @as_then
    def replay(self, x: Tensor, kept: tuple[Tensor, ...], y: Tensor) -> None:
        """Fill y from the kept output of the mixer."""
        (out,) = self.stash.get(kept[len(kept) - self.results :][:1])
        self._inject(x, out, y)

    def _inject(self, x: Tensor, out: Tensor, y: Tensor) -> None:
        for index, at in enumerate(self.run.tiles):
            y[:, at.start : at.stop] = self.run.after(index, x[:, at.start : at.stop], out[:, at.start : at.stop])[0]

    def _finish(self, x: Tensor, out: Tensor, y: Tensor) -> list[Tensor]:
        """Fill y, keeping products; return those of all tiles."""
        self.counts, found = [], []
        for index, at in enumerate(self.run.tiles):
            span = slice(at.start, at.stop)
            y[:, span], products = self.run.after_keeping(index, x[:, span], out[:, span])
            self.counts.append(len(products))
            found += products
        return found

    @as_then
    def backward(self, x: Tensor, kept: tuple[Tensor, ...], keep: Keep, gradients: Gradients) -> None:
        """Inject with gradients, differentiate the mixer, capture with gradients."""
        kept = self.stash.get(kept)
        before = len(kept) - self.results
        with torch.no_grad():
            operands = kept[before - self.operands : before] if keep.has_kv else self.capture(x)
            results = kept[before:] if keep.has_out else self.mix(operands)
        dtype, products = operands[0].dtype, iter(kept)  # products come first
        del kept
        # dout is the mixer's alone to let go: it exchanges it for another
        parts, shared = self.differentiate(self._after(results[0], products, gradients), operands, results)
        del operands, results, products
        for index, at in enumerate(self.run.tiles):
            douts = [part[:, at.start : at.stop].to(dtype) for part in parts]
            self.run.backward(index, gradients).before(douts, shared if index == 0 else ())

    def _after(self, out: Tensor, products: Iterator[Tensor], gradients: Gradients) -> Tensor:
        """Differentiate what follows the mixer, tile by tile; return the gradient of its output."""
        dout = torch.empty_like(out)
        for index, at in enumerate(self.run.tiles):
            known = [next(products) for _ in range(self.counts[index])] if self.counts else ()
            tile = self.run.backward(index, gradients, known)
            dout[:, at.start : at.stop] = tile.after(out[:, at.start : at.stop], hold=False)
        return dout


class WholeAttention(WholeMixing):
    """Attention over any exchange."""

    operands, results = 3, 2

    def __init__(self, run: LayerRun, attend_in: AttendIn, shard: Shard, stash: Stash) -> None:
        super().__init__(run, stash)
        self.attend_in, self.shard = attend_in, shard
        self.known: Attending | None = None

    def capture(self, x: Tensor) -> Operands:
        """Return q, k and v of all tokens and this rank's heads."""
        parts = []
        for index, at in enumerate(self.run.tiles):
            request = self.run.before(index, x[:, at.start : at.stop])
            self.known = self.known or Attending.of(request, self.attend_in(request), self.shard, whole=True)
            parts.append(request.operands())
        q, k, v = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
        return tuple(self._how.ulysses.enter(q, k, v).wait())

    def mix(self, operands: Operands) -> tuple[Tensor, ...]:
        """Attend over the whole sequence -> out of this rank's tokens, lse of its heads."""
        (q, k, v), how = operands, self._how
        ulysses = how.ulysses
        out, lse = how.exchange.forward(q, ulysses.expand(k), ulysses.expand(v), how.shard.schedule, how.score)
        lse = how.absorb_(out, lse)
        return ulysses.leave(out).wait(), lse

    def differentiate(self, dout: Tensor, operands: Operands, results: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
        """Return dq, dk and dv of this rank's tokens, and its part of the sinks' gradient if there are any."""
        (q, k, v), (out, lse), how = operands, results, self._how
        ulysses = how.ulysses
        out, dout = ulysses.enter_queries(out, dout).wait()
        saved = (q, ulysses.expand(k), ulysses.expand(v), out, lse)
        dq, dk, dv = how.exchange.backward(dout, saved, how.shard.schedule, how.score)
        d_sinks = how.sinks_gradient(dout, out, lse)
        parts = (dq, ulysses.contract(dk), ulysses.contract(dv))
        dqkv = ulysses.leave_gradients(*(part.to(q.dtype) for part in parts)).wait()
        return list(dqkv), [] if d_sinks is None else [d_sinks]

    @property
    def _how(self) -> Attending:
        assert self.known is not None
        return self.known


class WholeRecurrence(WholeMixing):
    """A recurrent mixer; its weights are kept as they were in forward, which are few."""

    operands, results = 1, 1

    def __init__(self, run: LayerRun, recurrent: Recurrent, share: Share, stash: Stash) -> None:
        super().__init__(run, stash)
        self.recurrent, self.share = recurrent, share
        self.net: DeltaNet | None = None
        self.weights: list[Tensor] = []

    def capture(self, x: Tensor) -> Operands:
        """Return the tokens of this rank's stretch and heads."""
        parts = []
        for index, at in enumerate(self.run.tiles):
            call = self.run.before(index, x[:, at.start : at.stop])
            parts.append(call.tokens)
        self.net, self.weights = call.net, [weight.detach().clone() for weight in call.weights]
        return (self.recurrent.enter(torch.cat(parts, 1), self.share),)

    def mix(self, operands: Operands) -> tuple[Tensor, ...]:
        """Run the recurrence -> out of this rank's tokens."""
        assert self.net is not None
        return (self.recurrent.forward(self.net, operands[0], self.weights, self.share),)

    def differentiate(self, dout: Tensor, operands: Operands, results: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
        """Return the gradients of this rank's tokens, and its part of those of the weights."""
        assert self.net is not None
        dtokens, dweights = self.recurrent.backward(self.net, dout, operands[0], self.weights, self.share)
        return [dtokens], dweights

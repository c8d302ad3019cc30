"""A decoder layer whose forward runs in tiles."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longspan.attention.build import Attend
from longspan.attention.call import Request
from longspan.batch import Shard
from longspan.errors import ModelError
from longspan.keep import Keep, Memory
from longspan.recurrent.build import Recurrent
from longspan.recurrent.call import DeltaNet, Recurrence
from longspan.stream.arguments import Arguments
from longspan.stream.compiled import CompiledHalves, Compiler
from longspan.stream.function import Mixing, StreamedLayer
from longspan.stream.halves import Halves
from longspan.stream.mixing import PrefixMixing
from longspan.stream.passage import Passage
from longspan.stream.quantized import quantised
from longspan.stream.routing import Balance, Choices, TileRouting
from longspan.stream.run import LayerRun
from longspan.stream.segment import Pass, Segment
from longspan.stream.settings import Settings
from longspan.stream.whole import WholeAttention, WholeRecurrence
from longspan.weights import under_zero3


class StreamedCall(Protocol):
    """The part of a model's forward call that a streamed layer needs."""

    shard: Shard
    memory: Memory
    compiler: Compiler | None
    passage: Passage
    segment: Segment | None
    balance: Balance | None
    names: frozenset[str]
    recurrent: Recurrent

    def attend_in(self, layer: int, request: Request) -> Attend:
        """Return what a streamed layer attends with."""
        ...

    def mix(self, request: Request | Recurrence) -> Tensor:
        """Mix tokens over the whole sequence."""
        ...


class Streamed:
    """Stands in for the `forward` of a decoder layer.

    Args:
        context: name of the keyword argument that carries the mixer's call.
        net: its recurrent mixer, if it has that in place of attention.
    """

    def __init__(self, layer: nn.Module, index: int, name: str, context: str, net: DeltaNet | None = None) -> None:
        self.layer, self.index, self.name, self.context, self.net = layer, index, name, context, net
        self.original = layer.forward
        self.signature = inspect.signature(self.original)
        self.halves = Halves(layer, self.original, next(iter(self.signature.parameters)), context)
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = kwargs.get(self.context)
        memory: Memory | None = getattr(call, "memory", None)
        compiles = memory is not None and self._compiles(call)
        if memory is not None:
            self._check_zero3(args, kwargs)
        if memory is None or (memory.of(self.index) is Keep.GRAPH and not compiles):
            return self.original(*args, **kwargs)
        for name, module in self.layer.named_modules():
            if module is not self.layer and type(module).__name__.startswith("FSDP"):
                raise ModelError(
                    f"{self.name}.{name} is sharded by fully_shard inside a streamed layer, whose gradients would be "
                    "lost. Call fully_shard on the decoder layer as a whole."
                )
        x, arguments = Arguments.bind(self.name, self.signature, self.context, args, kwargs)
        keep = memory.of(self.index)
        if keep is Keep.GRAPH:
            return self._compiled(call, x, arguments)
        halves = CompiledHalves(self.halves, call.compiler, memory.tile_tokens or 0) if compiles else self.halves
        draws = self.layer.training and not compiles  # compiled code is seen to draw nothing
        routing = None if call.balance is None else call.balance.of(self.layer)
        listening = None if routing is None else TileRouting(routing)
        tiles, settings = call.shard.tiles.local, Settings(self.layer)
        run = LayerRun(halves, arguments, tiles, draws, call.names, settings, routing=listening)
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        opens = keep.has_x and memory.of(self.index + 1).rebuilds
        layer_pass = Pass(self.layer, self.index, self._mixing(run, call, x.device), keep, opens, call)
        results = StreamedLayer.apply(layer_pass, torch.is_grad_enabled(), x, *parameters)
        if call.balance is None or routing is None:
            return results
        y, *choices = results
        call.balance.add(Choices(*choices), routing.gates)
        return y

    def _check_zero3(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a layer whose gradients DeepSpeed would reduce before they are there."""
        x = args[0] if args else kwargs.get(next(iter(self.signature.parameters)))
        if not torch.is_grad_enabled() or x is None or x.requires_grad:
            return
        if any(under_zero3(p) and p.requires_grad for p in self.layer.parameters()):
            raise ModelError(
                f"The input of {self.name} needs no gradient, as the embedding is frozen, and ZeRO-3 would reduce the "
                "layer's gradients too early. Call model.enable_input_require_grads() before deepspeed.initialize."
            )

    def _compiled(self, call: StreamedCall, x: Tensor, arguments: Arguments) -> Tensor:
        """Run the layer in one tile, its halves compiled, on autograd's own graph."""
        assert call.compiler is not None
        kwargs = arguments.tile(0, x.shape[1])
        through, routing = call.compiler.differentiable.through, call.balance and call.balance.of(self.layer)
        if call.balance is None or routing is None:
            return through(self.halves, x, kwargs, call.names, call.mix)
        y, choices = routing.listen(lambda: through(self.halves, x, kwargs, call.names, call.mix))
        call.balance.add(choices, routing.gates)
        return y

    def _compiles(self, call: StreamedCall) -> bool:
        """Whether the layer's code is compiled in this pass: for full tiles, and not where dropout is at work."""
        if call.compiler is None or call.shard.layout.shard_tokens < (call.memory.tile_tokens or 0):
            return False
        if call.memory.of(self.index) is Keep.GRAPH and (
            self.net is not None
            or call.shard.layout.shard_tokens != call.memory.tile_tokens
            or any(map(quantised, self.layer.modules()))
        ):
            return False
        return not (
            self.layer.training
            and any(getattr(m, "p", 0) and "Dropout" in type(m).__name__ for m in self.layer.modules())
        )

    def _mixing(self, run: LayerRun, call: StreamedCall, device: torch.device) -> Mixing:
        if self.net is not None:
            share = call.shard.share(self.net.heads, self.net.width - 1, device)
            return WholeRecurrence(run, call.recurrent, share, call.passage.stash)
        attend_in = functools.partial(call.attend_in, self.index)
        kind = PrefixMixing if call.shard.layout.ring == 1 else WholeAttention
        return kind(run, attend_in, call.shard, call.passage.stash)

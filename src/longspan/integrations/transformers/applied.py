"""The handle of a prepared model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from longspan.attention.build import Attend
from longspan.attention.call import Kind
from longspan.batch import CONTEXT, Shard, batch_size, present, shard_batch, uncut
from longspan.errors import BatchError, ModelError
from longspan.integrations.transformers.attention import NAME
from longspan.integrations.transformers.automatic import Automatic
from longspan.integrations.transformers.config import use_attention
from longspan.integrations.transformers.forward import OUTPUT, Forward, ForwardCall, HeadForward
from longspan.integrations.transformers.mixers import mixer_forwards, net_of
from longspan.integrations.transformers.norm import NormForward
from longspan.integrations.transformers.parts import Parts
from longspan.integrations.transformers.rope import Rotary
from longspan.integrations.transformers.routers import Routers
from longspan.integrations.transformers.vision import Vision
from longspan.integrations.transformers.vocabulary import check_vocabulary
from longspan.integrations.transformers.zero import DeepSpeedCheck
from longspan.keep import Keep, Memory
from longspan.loader import ShardedLoader
from longspan.loss import LossOptions
from longspan.mesh import Axis, Mesh
from longspan.overrides import Overrides
from longspan.plan.exchange import ExchangeRule
from longspan.plan.kept import Operands
from longspan.plan.plan import Plan
from longspan.plan.setup import Optimizer
from longspan.recurrent.build import Recurrent
from longspan.recurrent.select import pick_rule
from longspan.stream.compiled import Compiler
from longspan.stream.layer import Streamed
from longspan.stream.passage import Passage
from longspan.stream.reserve import reserve
from longspan.stream.stash import Stash
from longspan.weights import sharded


class Applied:
    """What `longspan.prepare` returns: shards batches, reports, and undoes what was done to the model.

    All it changes are instance attributes of this model (the `forward` of the model, its head, its rotary embeddings
    and its recurrent mixers) and the name of its attention implementation; other models in the process are untouched.
    """

    def __init__(
        self,
        parts: Parts,
        mesh: Mesh,
        plan: Plan,
        attends: Mapping[Kind, Attend],
        memory: Memory,
        *,
        logits: bool,
        grad_reduction: str,
        in_eval: bool,
    ) -> None:
        self.parts = parts
        self.model: PreTrainedModel = parts.model
        self.mesh, self.plan, self.attends, self.memory = mesh, plan, attends, self._with_states(memory)
        self.recurrent = Recurrent(pick_rule(plan.kernel, parts.device)[0])
        self.compiler = None if memory.compile is None else Compiler(memory.compile)
        self.operands: Sequence[Operands] = ()
        self.logit_options = LossOptions()  # what the model makes of its head's output
        self.exchange = ExchangeRule()
        self.stash = Stash(parts.device, memory.budget)
        self.automatic: Automatic | None = None
        self.logits, self.grad_reduction, self.sequence_parallel_in_eval = logits, grad_reduction, in_eval
        self.call: ForwardCall | None = None
        self.bypassed = False
        self.fitting = False
        self.alone = not dist.is_initialized()
        self.compared = False
        self.settings: tuple[object, ...] = ()
        self._plain_attention = cast(str, parts.trunk.config._attn_implementation)
        self._replaced = Overrides()
        rotaries = [(module, Rotary(module, self)) for module in parts.rotaries]
        use_attention(parts.trunk, NAME)
        self.routers = Routers.of(parts)
        self.routers.install()
        mixers = mixer_forwards(parts.layers)
        self._replace([(self.model, Forward(self)), (parts.head, HeadForward(self)), *rotaries, *mixers])
        self.vision = None if parts.sight is None else Vision(parts.sight, self)
        for module, values in () if self.vision is None else self.vision.stand_ins():
            self._replaced.set(module, **values)
        if memory.streams:
            self._stream()
        self.model._longspan_applied = self  # type: ignore[assignment]
        self.model.set_deepspeed_parallelism = DeepSpeedCheck(mesh, grad_reduction)  # type: ignore[assignment]

    def held_by(self, engine: str, optimizer: Optimizer) -> None:
        """Say who will hold parameters, and so many bytes of each; where memory is planned, it is planned for that."""
        if self.automatic is not None:
            self.automatic.held_by(engine, optimizer)

    def decide(self, automatic: Automatic) -> None:
        """Let what layers keep be decided for each length of rows."""
        self.automatic = automatic
        self._stream()

    def _stream(self) -> None:
        parts = self.parts
        self._replace(
            (layer, Streamed(layer, i, f"{parts.layers_name}.{i} ({type(layer).__name__})", CONTEXT, net_of(layer)))
            for i, layer in enumerate(parts.layers)
        )
        for layer in parts.layers:
            layer._z3_leaf = True  # type: ignore[assignment]  (ZeRO-3 then gathers a layer as a whole, once per pass)
        if parts.norm is not None:
            self._replace([(parts.norm, NormForward(self, parts.norm))])

    def _replace(self, forwards: Iterable[tuple[nn.Module, Any]]) -> None:
        for module, forward in forwards:
            self._replaced.set(module, forward=forward)

    @property
    def layers(self) -> nn.ModuleList:
        """Decoder layers of the trunk."""
        return self.parts.layers

    @property
    def blocks(self) -> list[nn.Module]:
        """Decoder layers, after those of a vision tower."""
        return self.parts.blocks

    def shard(
        self, batch: Mapping[str, Any], num_items: int | Tensor | None = None, token_fields: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Cut a full batch, the same on every sequence-parallel rank, into this rank's part.

        Args:
            batch: input_ids [B, S] or inputs_embeds [B, S, d], labels [B, S], and what describes documents and
                padding; see `longspan.batch.shard_batch`.
            num_items: targets of the whole optimizer step over data ranks and accumulated micro-batches; None for
                those of this micro-batch, added up over the data ranks during forward.
            token_fields: names of further tensors [B, S, ...] to cut.

        Returns:
            Keyword arguments for the model. Pure and free of collectives: ranks with other batches do not hear of a
            BatchError here, and would wait in forward; `loader` raises on all.
        """
        batch = present(batch)
        check_vocabulary(self.parts, batch)
        if self.automatic is not None:
            self._settle(*batch_size(batch))
        part = (shard_batch if self.vision is None else self.vision.shard)(
            batch,
            self.mesh,
            num_items=num_items,
            token_fields=token_fields,
            tile_tokens=self.memory.tile_tokens if self.memory.streams else None,
            exchange=self.exchange,
            told_apart=self.mesh.sequence.size > 1 and not self.compared,
        )
        if self.mesh.ring.size > 1:
            self.plan = replace(self.plan, kv_exchange=str(part[CONTEXT].exchange))
        return part

    def memory_of(self, shard: Shard) -> Memory:
        """Return how layers run on a part."""
        if self.automatic is None:
            return self.memory
        memory = self._settle(shard.rows, shard.layout.tokens)
        if (memory.tile_tokens if memory.streams else None) == shard.tile_tokens:
            return memory
        # the part was cut when parameters were held in another way, as before fully_shard; its tiles cannot change
        keep = memory.keep if memory.streams else Keep.X_O
        return Memory() if shard.tile_tokens is None else replace(memory, tile_tokens=shard.tile_tokens, keep=keep)

    def _settle(self, rows: int, tokens: int) -> Memory:
        """Decide how layers run on rows of so many tokens."""
        assert self.automatic is not None
        made, exchange = self.automatic.plan(self.model, rows, tokens), self.plan.kv_exchange
        self.plan = made if exchange is None else replace(made, kv_exchange=exchange)  # what the last batch said stays
        assert self.plan.memory is not None
        self.memory = self._with_states(self.plan.memory)
        if self.memory.compile is not None and self.compiler is None:
            self.compiler = Compiler(self.memory.compile)
        return self.memory

    def _with_states(self, memory: Memory) -> Memory:
        """Let layers keep their input where it is not what the layer before returned: DeepStack adds to it."""
        return memory if self.parts.sight is None else memory.with_states(range(1, self.parts.sight.stacked + 1))

    def loader(
        self, batches: Iterable[Mapping[str, Any]], accumulation: int = 1, token_fields: Sequence[str] = ()
    ) -> ShardedLoader:
        """Iterate over parts of the batches of a data loader that all sequence-parallel ranks read alike."""
        return ShardedLoader(batches, partial(self.shard, token_fields=token_fields), self.mesh, accumulation)

    def gather(self, x: Tensor, part: Mapping[str, Any] | Shard) -> Tensor:
        """Return a per-token tensor of a part at full length, unpadded and in order, on every rank.

        Args:
            x: [B, s, ...], tokens as in the part.
            part: the part that x was computed from.

        Returns:
            [B, S, ...]; padding that the batch came with is 0. Differentiable: whoever computes the same loss from it
            on every rank gets the gradients of one device under the engine that `grad_reduction` names.

        Cost: one all-gather over the sequence axis; backward has none.
        """
        shard = _context(part)
        if not isinstance(x, Tensor):
            raise BatchError(
                f"gather takes a tensor of the part, got {type(x).__name__}; a model returns logits only if it was "
                "prepared with logits=True."
            )
        if x.dim() < 2 or x.shape[:2] != (shard.rows, shard.layout.shard_tokens):
            raise BatchError(
                f"gather takes [B={shard.rows}, {shard.layout.shard_tokens} tokens, ...] of this part, "
                f"got {list(x.shape)}."
            )
        scale = float(self.mesh.sequence.size) if self.grad_reduction == "mean" else 1.0
        full = _Gather.apply(x, shard, scale)
        if shard.lengths is None:
            return full
        lengths = torch.tensor(shard.lengths, device=full.device)
        real = torch.arange(full.shape[1], device=full.device) < lengths[:, None]
        return full.masked_fill(~real.view(*real.shape, *[1] * (full.dim() - 2)), 0)

    @overload
    def token_logps(self, part: Mapping[str, Any], *, gather: bool = False, model: Any = None) -> Tensor: ...
    @overload
    def token_logps(
        self, part: Mapping[str, Any], *, entropy: bool, gather: bool = False, model: Any = None
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    def token_logps(
        self, part: Mapping[str, Any], *, entropy: bool = False, gather: bool = False, model: Any = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the log-probability of each token's target, without ever holding the logits.

        Args:
            part: what `shard` returned, with labels.
            entropy: also return the entropy of each token's prediction, in nats.
            gather: return them at full length [B, S] on every rank; else [B, s], aligned with `shift_labels`.
            model: the module to call if an engine wraps the model (DDP, DeepSpeed).

        Returns:
            Log-probabilities, 0 where there is no target; differentiable.

        Cost: one forward pass; backward runs the head once more.
        """
        results = self._per_token("logps_and_entropy" if entropy else "logps", part, gather, model)
        return (results[0], results[1]) if entropy else results[0]

    @torch.no_grad()
    def greedy_scores(
        self, part: Mapping[str, Any], *, gather: bool = False, model: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each target, and 1 where greedy decoding would pick it, else 0.

        For few targets: only their tokens get logits. Arguments and shapes are those of `token_logps`.

        Cost: one forward pass without gradients, in which layers keep nothing; one host sync.
        """
        logps, hits = self._per_token("greedy", part, gather, model)
        return logps, hits

    def _per_token(self, asked: str, part: Mapping[str, Any], gather: bool, model: Any) -> tuple[Tensor, ...]:
        out = (model if model is not None else self.model)(**part, **{OUTPUT: asked}).logits
        return tuple(self.gather(t, part) if gather else t for t in out.unbind(-1))

    def passage(self, shard: Shard, memory: Memory) -> Passage:
        """Return what the layers of a new forward pass keep, nothing yet."""
        known, budget = self.stash.budget, memory.budget
        if (known.host_bytes, known.directory) != (budget.host_bytes, budget.directory):
            self.stash.close()
            self.stash = Stash(self.parts.device, budget)
        self.stash.budget = budget  # the host memory that is reserved already stays
        layout = shard.layout
        return Passage(self.stash, memory, self.operands, layout.ulysses, layout.ring > 1, layout.size)

    def reserve(self, part: Mapping[str, Any]) -> None:
        """Pin the host memory that a training step on a part will use, which the first such step does otherwise.

        Call it after a step, however short: how much layers keep of a token is known from then on.

        Raises:
            ConfigError: budgets do not hold it, or CUDA does not pin it.
            TrainingError: there was no step.

        Cost: about a quarter of a second per GiB that is not pinned yet; nothing on CPUs, or if nothing leaves the GPU.
        """
        shard = _context(part)
        reserve(self.passage(shard, self.memory_of(shard)), shard.rows, shard.layout.shard_tokens)

    def reduce_gradients(self) -> None:
        """Reduce all gradients over the world axis, for training without an engine that does it.

        Cost: one all-reduce per parameter with a gradient, and a small one that finds parameters without.

        Raises:
            ModelError: an engine shards the parameters, and reduces them itself.
        """
        world = self.mesh.world
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if any(map(sharded, parameters)):
            raise ModelError(
                "The engine that shards the parameters reduces their gradients; leave reduce_gradients out."
            )
        if world.size == 1 or not parameters:
            return
        present = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device, dtype=torch.int8)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=world.group)
        for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
            if not somewhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=world.group)
            if self.grad_reduction == "mean":
                parameter.grad /= world.size

    @contextmanager
    def bypass(self) -> Iterator[PreTrainedModel]:
        """Make the model the plain one for a while: full batches, `generate`, its own attention and loss."""
        if self.bypassed:
            yield self.model
            return
        use_attention(self.parts.trunk, self._plain_attention)
        self.bypassed = True
        try:
            yield self.model
        finally:
            self.bypassed = False
            if self._replaced:
                use_attention(self.parts.trunk, NAME)

    @contextmanager
    def fit(self) -> Iterator[None]:
        """Prove that a length fits, in a fraction of a step's time: attention runs in a few calls of the last layer.

        Inside, all else is real: every buffer is allocated, every product computed, every tensor kept, moved and
        rebuilt as in a step of that length. Loss and gradients are meaningless. Layers that keep their graph attend
        as ever.
        """
        self.fitting = True
        try:
            yield
        finally:
            self.fitting = False

    def remove(self) -> None:
        """Give the model back as it was before `prepare`."""
        replaced = bool(self._replaced)
        self._replaced.restore()
        self.stash.close()
        if replaced:
            use_attention(self.parts.trunk, self._plain_attention)
            del self.model._longspan_applied, self.model.set_deepspeed_parallelism
            for layer in self.layers:
                vars(layer).pop("_z3_leaf", None)
            self.routers.remove()


def _context(part: Mapping[str, Any] | Shard) -> Shard:
    shard = part if isinstance(part, Shard) else part.get(CONTEXT)
    if not isinstance(shard, Shard):
        raise BatchError("Pass the part that handle.shard returned.")
    return shard


class _Gather(torch.autograd.Function):
    """All-gather of a shard's tokens; backward hands each rank the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard, scale: float) -> Tensor:
        ctx.shard, ctx.scale = shard, scale
        axis: Axis = shard.mesh.sequence
        x = x.contiguous()
        parts = [x]
        if axis.size > 1:
            parts = [torch.empty_like(x) for _ in range(axis.size)]
            dist.all_gather(parts, x, group=axis.group)
        return uncut(parts, shard.layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dfull: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.shard.cut(dfull) * ctx.scale, None, None

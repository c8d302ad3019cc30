"""One forward pass of a prepared model: context in, global loss out."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.build import Attend
from longspan.attention.call import Request
from longspan.batch import CACHES, CONTEXT, Shard
from longspan.errors import BatchError, ModelError, TopologyError
from longspan.integrations.transformers.attention import NAME
from longspan.integrations.transformers.carry import Carry
from longspan.integrations.transformers.dropout import OwnDraws
from longspan.integrations.transformers.objective import balance_loss, global_loss
from longspan.integrations.transformers.routers import ROUTER_LOGITS, GateLogits, real_tokens
from longspan.kernels.fit import FitKernel
from longspan.loss import Head, greedy_scores, tiled_loss, token_logps, token_scores
from longspan.mesh import Mesh
from longspan.recurrent.call import Recurrence
from longspan.stream.quantized import whole_weights
from longspan.stream.routing import Balance
from longspan.stream.segment import Segment
from longspan.weights import under_zero3

if TYPE_CHECKING:
    from longspan.integrations.transformers.applied import Applied
    from longspan.integrations.transformers.vision import Seen

Output = Literal["loss", "logps", "logps_and_entropy", "scores", "greedy"]


class ForwardCall:
    """What one forward pass carries: to the mixers of its layers, and to the head and the rotary embeddings.

    Not a dataclass on purpose: FSDP2 rebuilds dataclasses among the arguments of every layer, and a layer must meet
    this very object, with what earlier layers have left in it.

    Args:
        applied: the handle, for how the layers run.
        names: keyword arguments of the caller, which models hand on to attention.
        shift_labels: [B, s] targets of this rank's tokens, or None.
        output: what the head is to make of its hidden states.
    """

    def __init__(
        self, applied: Applied, shard: Shard, names: frozenset[str], shift_labels: Tensor | None, output: Output
    ) -> None:
        self.shard, self.attends, self.recurrent = shard, applied.attends, applied.recurrent
        self.memory = applied.memory_of(shard)
        self.compiler = None if self.memory.compile is None else applied.compiler
        self.names, self.shift_labels, self.output = names, shift_labels, output
        self.fitting, self.last = applied.fitting, len(applied.layers) - 1
        self.carry = Carry()  # of what the head makes
        self.passage = applied.passage(shard, self.memory)
        self.segment: Segment | None = None  # of the layers that are rebuilt together, the one at hand
        self.balance: Balance | None = None  # what the gates of expert layers choose, if that is asked for
        self.gates: GateLogits | None = None  # what they return, if that is asked for
        self.seen: Seen | None = None  # what the vision tower made for this rank's tokens

    def left_behind(self) -> tuple[Carry, Balance | None]:
        """Return what the head and the gates made, and hold no part of the graph any more: its nodes hold this call."""
        left = self.carry, self.balance
        self.carry, self.balance, self.gates, self.segment, self.seen = Carry(), None, None, None, None
        return left

    def attend_in(self, layer: int, request: Request) -> Attend:
        """Return what a streamed layer attends with."""
        attend = self._attend(request)
        if not self.fitting:
            return attend
        calls = _FIT_CALLS if layer == self.last else 0
        return Attend(attend.mesh, FitKernel(attend.kernel, calls))

    def _attend(self, request: Request) -> Attend:
        """Return what serves a call, as it was picked when the model was prepared."""
        try:
            return self.attends[request.kind]
        except KeyError:
            raise ModelError(
                f"{request.layer} calls attention with {request.kind}, as no layer did when the model was prepared: "
                "its settings were changed since. Call handle.remove() and prepare it again."
            ) from None

    def mix(self, request: Request | Recurrence) -> Tensor:
        """Mix over the whole sequence; operands of this rank's tokens -> [B, s, H, Dv]."""
        expected = (self.shard.rows, self.shard.layout.shard_tokens)
        if isinstance(request, Recurrence):
            net, tokens = request.net, request.tokens
            if tokens.shape[:2] != expected:
                raise ModelError(f"A recurrent mixer was given {list(tokens.shape[:2])} tokens, not {list(expected)}.")
            return self.recurrent(request, self.shard.share(net.heads, net.width - 1, tokens.device))
        request.refuse_unknown(self.names)
        q, k, v = request.operands()
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.shape[:2] != expected:
                raise ModelError(
                    f"{request.layer} hands attention {name} {list(t.shape)}, expected [B={expected[0]}, "
                    f"{expected[1]} tokens, heads, head_dim]."
                )
        schedule = self.shard.within(request.window).schedule
        return self._attend(request)(q, k, v, schedule, request.score, request.sinks)


_FIT_CALLS = 8
"""Real kernel calls of a fit, in forward and in backward of the last layer."""


class Forward:
    """Stands in for the model's `forward`: takes a sharded batch, returns the global loss."""

    def __init__(self, applied: Applied) -> None:
        self.applied = applied
        self.original = applied.model.forward
        self.draws = OwnDraws(applied.model, applied.mesh.sequence, applied.parts.device)
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        applied = self.applied
        shard: Shard | None = kwargs.pop(CONTEXT, None)
        if applied.bypassed:
            return self._plain("inside handle.bypass()", shard, args, kwargs)
        if not applied.model.training and not applied.sequence_parallel_in_eval:
            with applied.bypass():
                return self._plain("in eval (sequence_parallel_in_eval=False)", shard, args, kwargs)
        call = self._call(shard, kwargs)
        if not applied.compared:
            _compare_batches(call.shard, applied.mesh)
            applied.compared = True
        device = applied.parts.device
        kwargs = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        if applied.vision is not None:
            call.seen = applied.vision.see(call.shard, kwargs)
        outer, applied.call = applied.call, call
        gates = call.gates
        try:
            tap = nullcontext() if call.balance is None else call.balance.router.tap.into(call.balance)
            with tap, nullcontext() if gates is None else gates.listening(), self.draws.drawn():
                out = self.original(*args, **kwargs, **{CONTEXT: call})
        finally:
            applied.call = outer
            carry, balance = call.left_behind()
        results = carry.unload(out.logits)
        if call.shift_labels is not None and not results:
            raise ModelError(
                f"The output head that longspan prepared was not called: {type(applied.model).__name__} has another "
                "one now. Resize embeddings and add adapters before longspan.prepare."
            )
        fields = {key: value for key, value in out.items() if key not in _LEFT_OUT}
        if gates is not None:
            fields["router_logits"] = gates.taken()
        if call.output != "loss":
            if balance is not None:
                fields["aux_loss"] = self._auxiliary(call, balance)[0]
            return type(out)(**fields, logits=torch.stack(results, -1))
        if applied.logits:
            fields["logits"] = out.logits
        loss = global_loss(results[0], call.shard, applied.grad_reduction) if results else None
        if balance is None:
            return type(out)(loss=loss, **fields)
        return type(out)(**self._balanced(call, balance, loss), **fields)

    def _balanced(self, call: ForwardCall, balance: Balance, loss: Tensor | None) -> dict[str, Tensor | None]:
        """Add the router's auxiliary loss to the loss, with the model's own factor."""
        model = cast(Any, self.applied.model)
        auxiliary, weight = self._auxiliary(call, balance)
        if loss is not None:
            loss = loss + model.router_aux_loss_coef * weight * auxiliary
        return {"loss": loss, "aux_loss": auxiliary}

    def _auxiliary(self, call: ForwardCall, balance: Balance) -> tuple[Tensor, Tensor | float]:
        """Return the router's auxiliary loss, and its weight among the micro-batches of the optimizer step."""
        applied = self.applied
        choices, top_k = balance.total(len(applied.routers.gates)), balance.router.top_k
        return balance_loss(choices, top_k, call.shard, call.shift_labels, applied.grad_reduction)

    def _plain(self, where: str, shard: Shard | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if shard is not None:
            raise BatchError(f"A sharded batch was given to the plain model {where}; pass the full batch.")
        return self.original(*args, **kwargs)

    def _call(self, shard: Shard | None, kwargs: dict[str, Any]) -> ForwardCall:
        """Check the arguments, take what is ours out of them, and make the call's context."""
        applied = self.applied
        if not isinstance(shard, Shard):
            raise BatchError(
                "This model is prepared for sequence parallelism and was given a full batch. Call "
                "model(**handle.shard(batch)), or use `with handle.bypass():` for the plain model."
            )
        if applied.alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise TopologyError(
                f"The model was prepared before torch.distributed was initialised, so it knows nothing of the "
                f"{dist.get_world_size()} processes: call init_process_group first, then longspan.prepare."
            )
        theirs, ours = shard.layout, applied.mesh
        if (theirs.ring, theirs.ulysses) != (ours.ring.size, ours.ulysses.size):
            raise BatchError(
                f"The batch was sharded for ulysses {theirs.ulysses} x ring {theirs.ring}, this model is prepared for "
                f"{ours.ulysses.size} x {ours.ring.size}: shard it with this model's handle."
            )
        if any(kwargs.get(name) is not None for name in CACHES) or kwargs.get("use_cache"):
            raise BatchError(
                "A KV cache cannot be used with a sharded sequence: pass use_cache=False and no past_key_values; to "
                "generate, use `with handle.bypass():`."
            )
        if kwargs.get("return_dict") is False:
            raise BatchError("Prepared models return a dict-like output; leave return_dict out.")
        for name, why in _REFUSED.items():
            value = kwargs.get(name)
            value = getattr(applied.model.config, name, None) if value is None else value
            if value is not None and value is not False:
                raise BatchError(f"A prepared model cannot be called with {name}: {why}.")
        for name in sorted(_MEANT_FOR_ATTENTION & set(kwargs)):
            if kwargs[name] is not None:
                raise ModelError(
                    f"The model was called with {name}={kwargs[name]!r} for its attention, which longspan does not "
                    "support yet; leaving it out would change the result."
                )
        attention = applied.parts.trunk.config._attn_implementation
        if attention != NAME:
            raise ModelError(
                f"The model's attention implementation was set to '{attention}' after longspan.prepare, so its tokens "
                "would see this rank's part alone. Use `with handle.bypass():` for the plain model."
            )
        if applied.parts.checkpointing and applied.model.training:
            raise ModelError(GRADIENT_CHECKPOINTING)
        labels, output = kwargs.pop("shift_labels", None), kwargs.pop(OUTPUT, "loss")
        if labels is None and (output != "loss" or not applied.logits):
            raise BatchError(
                "The batch has no labels, so there is nothing to compute: add labels, or ask for logits with "
                "prepare(..., logits=True)."
            )
        names = (frozenset(kwargs) | frozenset(shard.passed)) - _MEANT_FOR_ATTENTION
        call = ForwardCall(applied, shard, names, labels, output)
        self._listen(call, kwargs)
        return call

    def _listen(self, call: ForwardCall, kwargs: dict[str, Any]) -> None:
        """Listen to the gates if the router's auxiliary loss, or its logits, are asked for."""
        applied = self.applied
        asked, setting = kwargs.pop(ROUTER_LOGITS, None), getattr(applied.model.config, ROUTER_LOGITS, False)
        if setting or asked:
            kwargs[ROUTER_LOGITS] = False  # which keeps the model from computing a loss of its own
        if setting if asked is None else asked:
            router = applied.routers.known()
            if call.output in ("loss", "scores"):
                call.balance = Balance(router, real_tokens(call.shard, applied.parts.device))
        if asked:  # by the caller, who wants the logits too
            call.gates, call.compiler = GateLogits(applied.routers, call.shard), None


_MEANT_FOR_ATTENTION = frozenset({"sliding_window", "softcap", "s_aux"})
"""Arguments that some attention functions heed when the caller passes them to the model."""

_LEFT_OUT = ("logits", "image_outputs", "video_outputs")
"""Fields of a model's output that are of this rank alone."""

_REFUSED = {
    "attention_mask": "handle.shard reads it from the full batch",
    "cu_seq_lens_q": "handle.shard reads it from the full batch",
    "cu_seqlens": "handle.shard reads it from the full batch",
    "labels": "handle.shard makes shift_labels of the labels of the full batch",
    "num_items_in_batch": "the number of targets goes into handle.shard(batch, num_items=...)",
    "output_attentions": "attention weights of all queries by all keys are never formed",
}
"""Arguments, some of which may also stand in the config, that would be without effect or wrong; and why."""

OUTPUT = "longspan_output"
"""Keyword with which the handle asks a forward pass for log-probabilities in place of the loss."""

GRADIENT_CHECKPOINTING = (
    "Gradient checkpointing of transformers is switched on; its recomputation would repeat every exchange between the "
    "ranks. Call model.gradient_checkpointing_disable()."
)


class HeadForward:
    """Stands in for the `forward` of the output head: makes the loss from hidden states, tile by tile."""

    def __init__(self, applied: Applied) -> None:
        self.applied = applied
        self.module = applied.parts.head
        self.original = applied.parts.head.forward
        functools.update_wrapper(self, self.original)

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = self.applied.call
        if call is None:
            return self.original(hidden, *args, **kwargs)
        if hidden.shape[:2] != (call.shard.rows, call.shard.layout.shard_tokens):
            raise ModelError(
                f"The head was given {list(hidden.shape)} of {call.shard.layout.shard_tokens} tokens a row."
            )
        call.passage.stash.settle()
        with whole_weights(self.module.modules()) as instead:
            return self._made(call, hidden, instead.get(self.module, self.original), *args, **kwargs)

    def _made(self, call: ForwardCall, hidden: Tensor, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Make what the call asks for of hidden states [B, s, d], with a forward of the head."""
        head = Head(forward, tuple(p for p in self.module.parameters() if p.requires_grad))
        labels, options = call.shift_labels, self.applied.logit_options
        if labels is not None:
            labels = labels.to(hidden.device, non_blocking=True)
        results: tuple[Tensor, ...] = ()
        if call.output == "logps" and labels is not None:
            results = (token_logps(hidden, head, labels, options=options),)
        elif call.output == "logps_and_entropy" and labels is not None:
            results = token_logps(hidden, head, labels, entropy=True, options=options)
        elif call.output == "scores" and labels is not None:
            results = token_scores(hidden, head, labels, options)
        elif call.output == "greedy" and labels is not None:
            results = greedy_scores(hidden, head, labels, options)
        elif self.applied.logits:
            logits = forward(hidden, *args, **kwargs)
            if labels is not None:
                results = (tiled_loss(logits, Head(lambda tile: tile, ()), labels, options=options),)
            gathers = any(map(under_zero3, head.parameters))
            return call.carry.load(logits, results) if gathers else call.carry.beside(logits, results)
        elif labels is not None:
            results = (tiled_loss(hidden, head, labels, options=options),)
        return call.carry.load(hidden.new_empty(*hidden.shape[:2], 0), results)


def _compare_batches(shard: Shard, mesh: Mesh) -> None:
    """Refuse a first batch that the ranks of a sequence do not share; `handle.loader` looks at every batch.

    Cost: one small all-reduce, once per handle, and a read of its result.
    """
    if mesh.sequence.size == 1:
        return
    edges = torch.tensor([shard.fingerprint, -shard.fingerprint], device=mesh.device_type)
    dist.all_reduce(edges, dist.ReduceOp.MIN, group=mesh.sequence.group)
    if int(edges[0]) != -int(edges[1]):
        raise BatchError(
            f"The {mesh.sequence.size} ranks that share a sequence were given different batches. Give them the same "
            "ones: a DistributedSampler must count data-parallel ranks only (handle.mesh.data.size and .rank)."
        )

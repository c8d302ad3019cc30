"""Losses and log-probabilities of long sequences, from hidden states, without ever holding their logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.errors import BatchError, ConfigError, ModelError, TopologyError
from longspan.tiling import Tiled, refuse_shards, wide_dtype


@dataclass(frozen=True)
class Head:
    """Turn hidden states into logits: any function of [1, n, d] that treats tokens alike, and what it trains.

    Make it where it is used: engines that shard swap a module's parameters between calls.

    Args:
        forward: [1, n, d] -> [1, n, V] (or [n, V]).
        parameters: the tensors inside `forward` that require gradients; leaves, or free of hooks.
    """

    forward: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]

    @classmethod
    def of(cls, head: nn.Module | Tensor, bias: Tensor | None = None) -> Head:
        """Describe a module (its `forward`, as it is: adapters and biases included) or a weight [V, d] with a bias [V].

        Hooks of the module itself do not run, those of modules inside it run once per tile.

        Raises:
            ModelError: a parameter is sharded at this moment, a bias comes with a module, or shapes do not fit.
        """
        if isinstance(head, nn.Module):
            if bias is not None:
                raise ModelError("A bias goes with a weight tensor; a module brings its own.")
            refuse_shards(dict(head.named_parameters()), "The head's")
            return cls(head.forward, tuple(p for p in head.parameters() if p.requires_grad))
        refuse_shards({"weight": head} if bias is None else {"weight": head, "bias": bias}, "The head's")
        if head.ndim != 2 or (bias is not None and bias.shape != head.shape[:1]):
            found = f"{tuple(head.shape)} and {None if bias is None else tuple(bias.shape)}"
            raise ModelError(f"A head's weight must be [V, d] and its bias [V], got {found}.")
        # An alias has no hooks, so those of the caller's tensor, leaf or not, see only the whole gradient.
        with torch.enable_grad():
            weight = head.view_as(head)
            offset = None if bias is None else bias.view_as(bias)
        trained = tuple(t for t in (weight, offset) if t is not None and t.requires_grad)
        return cls(lambda hidden: F.linear(hidden, weight, offset), trained)


@dataclass(frozen=True)
class LossOptions:
    """Say what the loss of a token is.

    Args:
        ignore_index: label of tokens without a target.
        logit_scale: logits are multiplied by it, before the softcap.
        softcap: logits become softcap * tanh(logits / softcap).
        label_smoothing: share of the target spread evenly over the vocabulary, as in torch's cross-entropy.
        z_loss: weight of the squared log-sum-exp of the logits, added to each token's loss.
    """

    ignore_index: int = -100
    logit_scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"label_smoothing must lie in 0 to 1, got {self.label_smoothing}.")
        if not 0 <= self.z_loss < math.inf:
            raise ConfigError(f"z_loss must be 0 or a positive number, got {self.z_loss}.")
        if not 0 < self.logit_scale < math.inf:
            raise ConfigError(f"logit_scale must be a positive number, got {self.logit_scale}.")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ConfigError(f"softcap must be a positive number, or None for no cap, got {self.softcap}.")

    def transform(self, logits: Tensor) -> Tensor:
        """Scale and cap logits, in float32 or wider if there is anything to do."""
        if self.logit_scale != 1:
            logits = logits.to(wide_dtype(logits.dtype)) * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits.to(wide_dtype(logits.dtype)) / self.softcap) * self.softcap
        return logits


_DEFAULT = LossOptions()


def tiled_loss(
    hidden: Tensor,
    head: Head | nn.Module | Tensor,
    shift_labels: Tensor,
    *,
    tile_tokens: int | None = None,
    reduction: Literal["sum", "mean", "none"] = "sum",
    options: LossOptions = _DEFAULT,
) -> Tensor:
    """Compute the cross-entropy of a head's logits tile by tile; full logits never exist.

    For "sum" and "mean" the gradients are made in the same pass, and the incoming gradient scales all of them.
    "none" runs the head again in backward.

    Args:
        hidden: [B, s, d] (any leading dims).
        head: a module, a weight [V, d], or a `Head`.
        shift_labels: integers [B, s]; the target of each position itself, `options.ignore_index` where there is none.
        tile_tokens: tokens per tile; None: a first tile of 512 tokens, then as many as make 1 GiB of float32 logits.
        reduction: "sum", "mean" over the tokens with a target (0 if there are none), or "none".

    Returns:
        0-d, or [B, s] for "none" (0 where ignored), in float32 or the logits' dtype if it is wider.

    Raises:
        BatchError: shapes, devices or labels that do not fit. On a GPU labels are not read back to be checked: there
            an index kernel asserts.
        ConfigError: an unknown reduction or a tile size below 1.

    Cost: no host sync. A tile takes 3 to 4 times its float32 logits, more with options. From forward to backward are
        kept the gradients of hidden (its dtype) and of the parameters (float32 or wider), or hidden alone for "none";
        hidden is copied if it is not contiguous.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ConfigError(f"reduction must be 'sum', 'mean' or 'none', got {reduction!r}.")
    tiled = _tiled(head, _losses, options, tile_tokens)
    flat, labels = _flatten(hidden, shift_labels)
    if reduction == "none":
        return tiled.per_token(flat, labels)[0].view(shift_labels.shape)
    total = tiled.sum(flat, labels)
    if reduction == "sum":
        return total
    return total / (labels != options.ignore_index).sum().clamp(min=1)


@overload
def token_logps(
    hidden: Tensor,
    head: Head | nn.Module | Tensor,
    shift_labels: Tensor,
    *,
    tile_tokens: int | None = None,
    entropy: Literal[False] = False,
    options: LossOptions = _DEFAULT,
) -> Tensor: ...


@overload
def token_logps(
    hidden: Tensor,
    head: Head | nn.Module | Tensor,
    shift_labels: Tensor,
    *,
    tile_tokens: int | None = None,
    entropy: Literal[True],
    options: LossOptions = _DEFAULT,
) -> tuple[Tensor, Tensor]: ...


def token_logps(
    hidden: Tensor,
    head: Head | nn.Module | Tensor,
    shift_labels: Tensor,
    *,
    tile_tokens: int | None = None,
    entropy: bool = False,
    options: LossOptions = _DEFAULT,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute each target's log-probability, and if asked the entropy it was drawn with, without full logits.

    Both are differentiable with respect to hidden and the head; backward runs the head again, tile by tile.

    Args:
        hidden, head, shift_labels, tile_tokens: as in `tiled_loss`.
        options: a label smoothing or z-loss is refused, since neither belongs to a probability.

    Returns:
        Log-probabilities [B, s], or these and the entropies [B, s] in nats; both 0 where the label is ignored.

    Cost: as `tiled_loss` with "none"; with entropies a tile takes 6 times its float32 logits.
    """
    if options.label_smoothing or options.z_loss:
        raise ConfigError(
            f"token_logps knows no label_smoothing (got {options.label_smoothing}) and no z_loss "
            f"(got {options.z_loss}); leave both at 0."
        )
    terms = _logps_and_entropies if entropy else _logps
    flat, labels = _flatten(hidden, shift_labels)
    outputs = _tiled(head, terms, options, tile_tokens).per_token(flat, labels)
    logps, *entropies = (output.view(shift_labels.shape) for output in outputs)
    return (logps, entropies[0]) if entropy else logps


def token_scores(
    hidden: Tensor, head: Head | nn.Module | Tensor, shift_labels: Tensor, options: LossOptions = _DEFAULT
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what training logs report of each target, with its log-probability, without full logits.

    Args:
        hidden, head, shift_labels, options: as in `token_logps`.

    Returns:
        Log-probabilities, differentiable; the entropies in nats and whether the target was the most likely token, 0 or
        1, both without gradient. All are [B, s], and 0 where the label is ignored.
    """
    flat, labels = _flatten(hidden, shift_labels)
    outputs = _tiled(head, _scores, options, None).per_token(flat, labels)
    logps, entropies, hits = (output.view(shift_labels.shape) for output in outputs)
    return logps, entropies.detach(), hits.detach()


@torch.no_grad()
def greedy_scores(
    hidden: Tensor, head: Head | nn.Module | Tensor, shift_labels: Tensor, options: LossOptions = _DEFAULT
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of a few targets, and whether greedy decoding picks them, without gradient.

    Args:
        hidden, head, shift_labels, options: as in `token_logps`.

    Returns:
        Log-probabilities, and 1 where the target is the most likely token, else 0; both [B, s], 0 where ignored.

    Cost: only tokens with a target get logits. One host sync.
    """
    flat, labels = _flatten(hidden, shift_labels)
    at = (labels != options.ignore_index).nonzero()[:, 0]
    logps, _, hits = token_scores(flat[at], head, labels[at], options)
    logps, hits = (x.new_zeros(len(labels)).index_copy(0, at, x).view(shift_labels.shape) for x in (logps, hits))
    return logps, hits


def reduce_loss(
    loss: Tensor,
    shift_labels: Tensor,
    group: dist.ProcessGroup | None = None,
    via: Literal["all_gather", "all_reduce"] = "all_gather",
    ignore_index: int = -100,
) -> Tensor:
    """Turn each rank's own mean loss into the mean over the targets of all ranks of a group.

    The gradient is made for engines that average gradients over the group (DDP, FSDP2): a rank's loss gets
    size * n / N of the incoming gradient, n being its own targets and N those of the group. It is the same both ways.
    Where gradients are summed instead, divide the result by the size before calling backward.

    Args:
        loss: this rank's mean over its targets, one element; it may be NaN on a rank without targets.
        shift_labels: this rank's targets, any shape.
        group: None is the default group, as in torch.distributed, or this process alone if there is none.
        via: the collective to use; with "all_gather" the ranks' shares are added in rank order.

    Returns:
        0-d, the same value on every rank of the group, in float32 or wider; 0 if no rank has a target.

    Cost: one collective of two numbers per rank in forward, none in backward; no host sync.
    """
    if via not in ("all_gather", "all_reduce"):
        raise ConfigError(f"via must be 'all_gather' or 'all_reduce', got {via!r}.")
    if loss.numel() != 1:
        raise BatchError(f"reduce_loss takes a rank's mean loss, one element; got shape {tuple(loss.shape)}.")
    wide = loss.reshape(()).to(wide_dtype(loss.dtype))
    targets = (shift_labels != ignore_index).sum().to(wide)
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size < 1:
        raise TopologyError(
            f"Rank {dist.get_rank()} is not in the group that reduce_loss was given; call it there only."
        )
    if size == 1:
        return wide.where(targets > 0, 0.0)
    return _WeightedMean.apply(wide, targets, group, via)


class _WeightedMean(torch.autograd.Function):
    """Average over the group's targets; backward needs no collective, since the weights are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, targets: Tensor, group: dist.ProcessGroup | None, via: str) -> Tensor:
        share = (loss * targets).where(targets > 0, 0.0)
        pair = torch.stack([share, targets])
        size = dist.get_world_size(group)
        if via == "all_gather":
            pairs = [torch.empty_like(pair) for _ in range(size)]
            dist.all_gather(pairs, pair, group=group)
            pair = torch.stack(pairs).sum(0)
        else:
            dist.all_reduce(pair, group=group)
        total, count = pair[0], pair[1].clamp(min=1)
        ctx.save_for_backward(size * targets / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors
        return d_result * weight, None, None, None


_Terms = Callable[[Tensor, Tensor, LossOptions], tuple[Tensor, ...]]


@dataclass(frozen=True)
class _HeadTerms:
    """Per-token terms of a head's logits."""

    head: Head
    terms: _Terms
    options: LossOptions

    def __call__(self, hidden: Tensor, labels: Tensor) -> tuple[tuple[Tensor, ...], int]:
        """Compute a tile: hidden [n, d], labels [n] -> terms [n], and the size of the vocabulary."""
        logits = self.head.forward(hidden[None])  # [1, n, V]
        tokens = len(hidden)
        if not isinstance(logits, Tensor) or logits.ndim < 2 or logits.shape[:-1].numel() != tokens:
            found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ModelError(f"A head must turn [1, {tokens}, {hidden.shape[-1]}] into [1, {tokens}, V], got {found}.")
        logits = logits.reshape(tokens, logits.shape[-1])
        _check_labels(labels, logits.shape[-1], self.options.ignore_index)
        return self.terms(self.options.transform(logits), labels, self.options), logits.shape[-1]


def _losses(logits: Tensor, labels: Tensor, options: LossOptions) -> tuple[Tensor]:
    log_probs, picked, ignored = _log_probs(logits, labels, options.ignore_index)
    loss = -picked
    if options.label_smoothing:
        loss = loss * (1 - options.label_smoothing) - log_probs.mean(-1) * options.label_smoothing
    if options.z_loss:
        loss = loss + options.z_loss * logits.to(log_probs.dtype).logsumexp(-1).square()
    return (loss.masked_fill(ignored, 0),)


def _logps(logits: Tensor, labels: Tensor, options: LossOptions) -> tuple[Tensor]:
    _, picked, ignored = _log_probs(logits, labels, options.ignore_index)
    return (picked.masked_fill(ignored, 0),)


def _logps_and_entropies(logits: Tensor, labels: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    log_probs, picked, ignored = _log_probs(logits, labels, options.ignore_index)
    # A logit of -inf has probability 0 and adds nothing; as it stands it would add 0 * inf.
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -math.inf, 0)).sum(-1)
    return picked.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0)


def _scores(logits: Tensor, labels: Tensor, options: LossOptions) -> tuple[Tensor, Tensor, Tensor]:
    picked, entropy = _logps_and_entropies(logits, labels, options)
    return picked, entropy, (logits.argmax(-1) == labels).to(picked.dtype)


def _log_probs(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return all log-probabilities [n, V], those of the targets [n], and which tokens are ignored [n]."""
    ignored = labels == ignore_index
    log_probs = logits.log_softmax(-1, dtype=wide_dtype(logits.dtype))
    picked = log_probs.gather(-1, labels.long().masked_fill(ignored, 0)[:, None])[:, 0]
    return log_probs, picked, ignored


def _tiled(head: Head | nn.Module | Tensor, terms: _Terms, options: LossOptions, tile_tokens: int | None) -> Tiled:
    head = head if isinstance(head, Head) else Head.of(head)
    return Tiled(_HeadTerms(head, terms, options), head.parameters, tile_tokens)


def _flatten(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check shapes and kinds, and return hidden [n, d] and labels [n]."""
    if hidden.ndim < 2 or hidden.shape[:-1] != labels.shape:
        raise BatchError(
            f"hidden must be [B, s, d] and shift_labels [B, s], got {tuple(hidden.shape)} and {tuple(labels.shape)}."
        )
    if not hidden.is_floating_point() or labels.is_floating_point() or labels.dtype == torch.bool:
        raise BatchError(
            f"hidden must be floating point and shift_labels integers, got {hidden.dtype} and {labels.dtype}."
        )
    if hidden.device != labels.device:
        raise BatchError(
            f"hidden is on {hidden.device} and shift_labels are on {labels.device}; move one of them to the other."
        )
    return hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuse labels outside the vocabulary, where looking at them needs no host sync."""
    if labels.device.type != "cpu":
        return
    wrong = labels[((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)]
    if len(wrong):
        raise BatchError(
            f"Label {int(wrong[0])} is outside the head's {vocabulary} logits; labels must be 0 to {vocabulary - 1}, "
            f"or {ignore_index} for tokens without a target."
        )

"""The check itself, on every rank: find the truth, then compare every sample under every pair of degrees."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.check.compare import (
    BFLOAT16,
    EXACT,
    FLOAT64,
    Case,
    Errors,
    Precision,
    baseline,
    faults,
    gradient_error,
    limits_from,
    moves,
    relative,
)
from longspan.check.float64 import float64_throughout
from longspan.check.images import with_images
from longspan.check.reference import Truth, evaluating, truth_of
from longspan.check.samples import Sample, samples
from longspan.check.settings import Settings
from longspan.check.trial import Trial, trial
from longspan.config import AdapterConfig
from longspan.errors import ConfigError
from longspan.integrations.multimodal import sight_of, text_vocabulary
from longspan.integrations.random_weights import (
    chooses_rope_by_length,
    few_layers,
    has_experts,
    narrowed,
    parameter_count,
    plain_attention,
    random_model,
    reach_tokens,
)
from longspan.plan.plan import Plan

_WIDE_PARAMETERS = 4_000_000
_MOST_PARAMETERS = 50_000_000
_MOST_SCORES_BYTES = 4 << 30
_MOST_DEGREES = 4


@dataclass(frozen=True)
class Bench:
    """What all cases share. Truths and baselines exist on the first rank only."""

    model: nn.Module
    samples: list[Sample]
    truths: list[Truth]
    baselines: list[Errors]
    precision: Precision
    experts: bool
    reach: int | None

    def only(self, names: Sequence[str]) -> Bench:
        """Return the same with some of the samples; with all if none is named."""
        at = [i for i, sample in enumerate(self.samples) if not names or sample.name in names]
        chosen = [[each[i] for i in at if i < len(each)] for each in (self.samples, self.truths, self.baselines)]
        return replace(self, samples=chosen[0], truths=chosen[1], baselines=chosen[2])


def run_check(config: Any, settings: Settings, device: torch.device) -> dict[str, Any] | None:
    """Check a model configuration; call it on every one of the `settings.sp` processes.

    Args:
        config: a transformers configuration; its weights are drawn.
        device: this process's.

    Returns:
        On the first rank `ok`, `cases`, and what was checked; None on the others.

    Raises:
        LongspanError: the model is refused, or cannot be divided as asked.
    """
    precision = _precision(settings.dtype, device)
    config = few_layers(config, settings.layers)
    config, changes = affordable(config) if device.type == "cpu" else (config, {})
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1
    tokens = _tokens(settings, heads, getattr(text, "max_position_embeddings", None), device)
    with float64_throughout() if precision is FLOAT64 else contextlib.nullcontext():
        made = _samples(settings, tokens, text_vocabulary(config))
        bench = make_bench(config, made, precision, device, settings.adapter)
        plans: list[Plan] = []
        cases: list[Case] = []
        for ulysses, ring in _degrees(settings, heads):
            if all((ulysses, ring) != (plan.ulysses_degree, plan.ring_degree) for plan in plans):
                plan, found = under(bench, settings, ulysses, ring)
                plans.append(plan)
                cases += found
    if _rank():
        return None
    return {
        "ok": bool(cases) and all(case.ok for case in cases),
        "cases": [case.to_json() for case in cases],
        "model": settings.model,
        "sequence_parallel_size": settings.sp,
        "seq_len": tokens,
        "layers": text.num_hidden_layers,
        "narrowed": changes,
        "adapted": settings.adapted,
        "device": str(device.type),
        "dtype": str(precision.dtype).removeprefix("torch."),
        "kernel": ", ".join(dict.fromkeys(plan.kernel for plan in plans)),
    }


def _samples(settings: Settings, tokens: int, vocabulary: int) -> list[Sample]:
    made = samples(tokens, vocabulary, settings.packed)
    names = [sample.name for sample in made]
    for name in settings.only:
        if name not in names:
            raise ConfigError(f"There is no sample named {name!r}; take some of {', '.join(names)}.")
    return [sample for sample in made if not settings.only or sample.name in settings.only]


def affordable(config: Any) -> tuple[Any, dict[str, int]]:
    """Return a configuration that CPUs check in a minute, and the widths that changed."""
    if parameter_count(config) <= _WIDE_PARAMETERS:
        return config, {}
    config, changes = narrowed(config)
    count = parameter_count(config)
    if count > _MOST_PARAMETERS:
        raise ConfigError(
            f"{type(config).__name__} has {count:,} parameters even with few layers and {changes or 'no width'} cut, "
            f"more than the {_MOST_PARAMETERS:,} that CPUs check in a minute. Check it on GPUs, or a narrower "
            "configuration."
        )
    return config, changes


def _precision(dtype: str | None, device: torch.device) -> Precision:
    known = {"float64": FLOAT64, "bfloat16": BFLOAT16}
    name = dtype or ("float64" if device.type == "cpu" else "bfloat16")
    if name not in known:
        raise ConfigError(f"dtype must be one of {', '.join(known)}, got {name!r}.")
    if name == "float64" and device.type != "cpu":
        raise ConfigError("GPU kernels do not compute in float64: take dtype bfloat16, or device cpu.")
    return known[name]


def _tokens(settings: Settings, heads: int, most: int | None, device: torch.device) -> int:
    """Return the tokens per row: by default an odd number, more of them on GPUs."""
    tokens = settings.seq_len
    if tokens is None:
        each = 40 if device.type == "cpu" else max(40, min(250, 2000 // settings.sp))
        tokens = each * settings.sp + 7
    if tokens < 4:
        raise ConfigError(f"A check needs at least 4 tokens per row, got {tokens}.")
    if most is not None and tokens > most:
        raise ConfigError(f"The model has positions for {most:,} tokens (max_position_embeddings), not for {tokens:,}.")
    scores_bytes = heads * tokens**2 * 8
    if scores_bytes > _MOST_SCORES_BYTES:
        raise ConfigError(
            f"The plain model would need {scores_bytes / 2**30:.0f} GiB for the attention scores of {tokens:,} tokens, "
            f"more than {_MOST_SCORES_BYTES >> 30} GiB; a check needs no such length, take a shorter one."
        )
    return tokens


def _degrees(settings: Settings, heads: int) -> list[tuple[int | None, int | None]]:
    """List the pairs of degrees to check; (None, None) stands for the automatic ones and comes first."""
    chosen = (settings.ulysses, settings.ring)
    if chosen != (None, None) or settings.sp == 1:
        return [chosen]
    return [chosen, *_divisions(settings.sp, heads)]


def _divisions(sp: int, heads: int) -> list[tuple[int, int]]:
    """List the ways to divide ranks between heads and keys, those between the extremes left out when there are many."""
    ways = [(u, sp // u) for u in range(min(sp, heads), 0, -1) if sp % u == 0]
    return ways if len(ways) <= _MOST_DEGREES else [*ways[: _MOST_DEGREES - 1], ways[-1]]


def make_bench(
    config: Any,
    made: list[Sample],
    precision: Precision,
    device: torch.device,
    adapter: AdapterConfig | None = None,
) -> Bench:
    """Build the model everywhere, and on the first rank find the truth of every sample."""
    model = random_model(config, precision.dtype, device, adapter)
    model.train()
    if (sight := sight_of(model)) is not None:
        made = [with_images(sample, sight) for sample in made]
    shows_length = chooses_rope_by_length(config)
    truths: list[Truth] = []
    baselines: list[Errors] = []
    if not _rank():
        reference: Any = copy.deepcopy(model)
        reference.to(dtype=precision.truth)
        reference.set_attn_implementation(plain_attention(reference))
        truths = [truth_of(reference, sample, shows_length) for sample in made]
        if precision is not FLOAT64:
            plain = copy.deepcopy(model)
            plain.set_attn_implementation(plain_attention(plain))
            for sample, truth in zip(made, truths, strict=True):
                rounded = truth_of(plain, sample, shows_length, exact=False)
                baselines.append(baseline(rounded, truth, precision.negligible))
    return Bench(model, made, truths, baselines, precision, has_experts(config), reach_tokens(config))


def under(bench: Bench, settings: Settings, ulysses: int | None, ring: int | None) -> tuple[Plan, list[Case]]:
    """Check every sample under one pair of degrees; the cases are those of the first rank, empty elsewhere."""
    with trial(bench.model, settings, ulysses, ring, logits=False) as ready:
        trained = [_trained(ready, sample) for sample in bench.samples]
    with trial(bench.model, settings, ulysses, ring, logits=True) as ready:
        moved = [_moved(ready, sample, bench) for sample in bench.samples]
    plan = ready.handle.plan
    cases = []
    for i, truth in enumerate(bench.truths):
        losses, gradients, eval_losses = trained[i]
        leaked, followed = moved[i]
        grad, where = gradient_error(gradients, truth.gradients, bench.precision.negligible)
        case = Case(
            f"{bench.samples[i].name} {plan.ulysses_degree}x{plan.ring_degree}",
            plan.ulysses_degree,
            plan.ring_degree,
            max(relative(loss, truth.loss) for loss in losses),
            grad,
            leaked,
            max(relative(loss, truth.loss) for loss in eval_losses),
            where,
        )
        limits = EXACT
        if bench.baselines:
            plain = bench.baselines[i]
            limits = limits_from(plain)
            case = replace(
                case,
                baseline_loss_rel_err=plain.loss,
                baseline_grad_rel_err=plain.grad,
                baseline_eval_rel_err=plain.loss,
            )
        cases.append(replace(case, why=faults(case, limits, followed, bench.precision)))
    return plan, cases


def _trained(ready: Trial, sample: Sample) -> tuple[Sequence[float], dict[str, Tensor], Sequence[float]]:
    """Train and evaluate once; return every rank's loss, the reduced gradients, and every rank's evaluation loss."""
    model = ready.module
    with ready.engine.accumulating(last=True):
        out = model(**ready.handle.shard(sample.batch))
        ready.engine.backward(out.loss)
    ready.engine.reduce()
    gradients = ready.take_gradients()
    with evaluating(model):
        eval_loss = model(**ready.handle.shard(sample.batch)).loss
    return _of_all_ranks(out.loss), {} if _rank() else gradients, _of_all_ranks(eval_loss)


def _of_all_ranks(loss: Tensor) -> Sequence[float]:
    value = loss.detach().double().reshape(1)
    if not dist.is_initialized():
        return value.tolist()
    everywhere = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, value)
    return torch.cat(everywhere).tolist()


def _moved(ready: Trial, sample: Sample, bench: Bench) -> tuple[int, float]:
    """Change one token in each of a few documents; return the logits that leaked and the least share that followed."""
    vocabulary = text_vocabulary(ready.handle.model.config)
    leaked, followed = 0, 1.0
    with evaluating(ready.module):
        before = _logits(ready, sample.batch)
        tolerance = bench.precision.leak * float(before.abs().max()) if bench.experts else 0.0
        for document in sample.probed():
            batch, at = sample.changed(document, vocabulary)
            found = moves(before, _logits(ready, batch), document, at, tolerance, bench.reach)
            leaked += found.leaked
            followed = min(followed, found.followed)
    return leaked, followed


def _logits(ready: Trial, batch: dict[str, Any]) -> Tensor:
    part = ready.handle.shard(batch)
    return ready.handle.gather(ready.module(**part).logits, part)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

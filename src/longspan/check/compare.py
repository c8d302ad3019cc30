"""How far a result is from the truth, and how far it may be."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.check.reference import Gradients, Truth
from longspan.check.samples import Document


@dataclass(frozen=True)
class Errors:
    """Relative errors of one run against the truth; `grad` is the worst over all parameters."""

    loss: float
    grad: float
    worst_parameter: str = ""


@dataclass(frozen=True)
class Limits:
    """What errors a case may show. Nothing may leak."""

    loss: float
    grad: float
    eval: float


@dataclass(frozen=True)
class Precision:
    """What to expect of a dtype.

    Args:
        negligible: a gradient smaller than this share of the norm of all gradients is measured against that share:
            what cancels to nothing has only rounding left.
        leak: with experts, how far a logit may move by rounding alone, as a share of the largest logit.
        follows: share of a changed document's later tokens, within reach of windows, whose logits must move.
    """

    dtype: torch.dtype
    truth: torch.dtype
    negligible: float
    leak: float
    follows: float


FLOAT64 = Precision(torch.float64, torch.float64, negligible=1e-6, leak=1e-10, follows=1.0)
BFLOAT16 = Precision(torch.bfloat16, torch.float32, negligible=1e-3, leak=2**-4, follows=0.5)

EXACT = Limits(loss=1e-9, grad=1e-8, eval=1e-9)
"""Limits in float64."""

TIMES_BASELINE = 2.0
"""In low precision: how many times the plain model's own error is allowed."""


@dataclass(frozen=True)
class Case:
    """One sample under one pair of degrees.

    Args:
        leak: logits that moved although no token they may see was changed.
        why: what is wrong; empty if nothing is.
    """

    name: str
    ulysses: int
    ring: int
    loss_rel_err: float
    grad_rel_err: float
    leak: int
    eval_rel_err: float
    worst_parameter: str
    baseline_loss_rel_err: float | None = None
    baseline_grad_rel_err: float | None = None
    baseline_eval_rel_err: float | None = None
    why: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every figure is within its limit."""
        return not self.why

    def to_json(self) -> dict[str, Any]:
        """Return plain values; numbers that are not finite become null, baselines are left out where there are none."""
        fields = {k: v for k, v in asdict(self).items() if v is not None}
        numbers = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        return {**numbers, "why": list(self.why), "ok": self.ok}


def relative(value: float, truth: float) -> float:
    """Return |value - truth| / |truth|; 0 if both are 0."""
    return 0.0 if value == truth else abs(value - truth) / abs(truth) if truth else math.inf


def gradient_error(found: Gradients, truth: Gradients, negligible: float) -> tuple[float, str]:
    """Return the worst relative error over all parameters, and the parameter.

    A gradient that is missing counts as zero. One that should be exactly zero must be.

    Args:
        negligible: see `Precision`.
    """
    total = math.sqrt(sum(float(g.double().square().sum()) for g in truth.values()))
    worst, where = 0.0, ""
    for name in dict.fromkeys([*truth, *found]):
        error = _parameter_error(found.get(name), truth.get(name), negligible * total)
        if error > worst or math.isnan(error):
            worst, where = error, name
    return worst, where


def _parameter_error(found: Tensor | None, truth: Tensor | None, least: float) -> float:
    if truth is None or not truth.any():
        return math.inf if found is not None and bool(found.ne(0).any()) else 0.0
    difference = truth.double() if found is None else found.to(truth.device).double() - truth.double()
    error = float(difference.norm()) / max(float(truth.double().norm()), least)
    return error if math.isfinite(error) else math.inf


def baseline(plain: Truth, truth: Truth, negligible: float) -> Errors:
    """Return the errors of the plain model in low precision; the loss's is the mean over tokens of |error|.

    The mean loss's own error is no yardstick: token errors of either sign cancel in it by chance.
    """
    loss = float((plain.losses - truth.losses).abs().mean()) / truth.loss
    return Errors(loss, *gradient_error(plain.gradients, truth.gradients, negligible))


def limits_from(plain: Errors) -> Limits:
    """Return the limits that follow from the plain model's own errors."""
    loss = TIMES_BASELINE * plain.loss
    return Limits(loss, TIMES_BASELINE * plain.grad, loss)


@dataclass(frozen=True)
class Moves:
    """What changing one token did: logits that must stay and moved, and the share of tokens that must move and did."""

    leaked: int
    followed: float


def moves(
    before: Tensor, after: Tensor, document: Document, at: int, tolerance: float, reach: int | None = None
) -> Moves:
    """Compare logits [B, S, V] before and after the token `at` of a document was changed.

    Args:
        tolerance: logits that differ by no more have stayed.
        reach: later tokens that may depend on a token; None for all of its document.
    """
    stop = document.stop if reach is None else min(document.stop, at + 1 + reach)
    moved = (before - after).abs() > tolerance
    may = torch.zeros(moved.shape[:2], dtype=torch.bool, device=moved.device)
    may[document.row, at:stop] = True
    leaked = int(moved[~may].sum())
    own = moved[document.row, at:stop].any(-1)
    return Moves(leaked, float(own.double().mean()) if own[0] else 0.0)


def faults(case: Case, limits: Limits, followed: float, precision: Precision) -> tuple[str, ...]:
    """Say what is wrong with a case.

    Args:
        followed: the smallest share, over the changed tokens, of later tokens of their document that moved with them.
    """
    figures = (
        ("loss_rel_err", case.loss_rel_err, limits.loss),
        ("grad_rel_err", case.grad_rel_err, limits.grad),
        ("leak", case.leak, 0),
        ("eval_rel_err", case.eval_rel_err, limits.eval),
    )
    why = [f"{name} {value:.3g} exceeds {limit:.3g}" for name, value, limit in figures if not value <= limit]
    if followed < precision.follows:
        why.append(f"only {followed:.0%} of a document's later tokens follow a change in it")
    return tuple(why)

"""What a model does to the output of its head before it returns logits: a factor and a softcap, as its config says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longspan.errors import ModelError
from longspan.loss import LossOptions

_FACTORS = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
"""Fields of configs that logits are multiplied with (Cohere, HyperCLOVA X, Muse, Falcon-H1)."""

_DIVISORS = ("logits_scaling",)
"""Fields that they are divided by (Granite)."""

_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")
"""Fields c that turn them into c * tanh(logits / c) (Gemma, xLSTM, RecurrentGemma)."""

_SPREAD = 3.0
"""Standard deviation of the logits that are tried, once scaled, in units of the softcap: it must bend them."""


def trial_logits(config: Any, shape: torch.Size, seed: int) -> Tensor:
    """Draw logits that show any of the known changes."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise * max((_SPREAD * o.softcap / o.logit_scale for o in _known(config) if o.softcap), default=1.0)


def logit_options(name: str, config: Any, before: Tensor, after: Tensor) -> LossOptions:
    """Find out what a model made of its head's output.

    Args:
        name: of the model, for the error.
        before: what the head returned, drawn by `trial_logits`.
        after: what the model returned as logits.

    Raises:
        ModelError: nothing that is known.
    """
    if torch.equal(before.to(after.dtype), after):
        return LossOptions()
    known = list(_known(config))
    if known and after.shape == before.shape:
        wanted = [options.transform(before.double()) for options in known]
        errors = [float((after.double() - each).abs().max() / each.abs().max()) for each in wanted]
        least = min(errors)
        if least <= (2**-5 if torch.finfo(before.dtype).bits == 16 else 1e-5):
            return known[errors.index(least)]
    looked = " or ".join(f"a scale of {o.logit_scale:g} with a softcap of {o.softcap}" for o in known)
    raise ModelError(
        f"{name} changes the output of its head before returning it as logits, and not as its config says "
        f"({looked or 'it names no scale and no softcap'}): the loss, which is made from the head's output tile by "
        "tile, would be that of other logits."
    )


def _known(config: Any) -> Iterator[LossOptions]:
    """List the changes that a config may mean, the plain ones first."""
    factors = [1.0, *_values(config, _FACTORS), *(1 / value for value in _values(config, _DIVISORS))]
    caps = [None, *_values(config, _SOFTCAPS)]
    for cap in caps:
        for factor in factors:
            if factor != 1.0 or cap is not None:
                yield LossOptions(logit_scale=factor, softcap=cap)


def _values(config: Any, names: tuple[str, ...]) -> list[float]:
    found = (getattr(config, name, None) for name in names)
    return [float(value) for value in found if isinstance(value, int | float) and value > 0]

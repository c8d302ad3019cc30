"""The truth: the plain model on one process, each document alone, and what that model loses in low precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan.check.samples import IGNORED, Document, Sample
from longspan.integrations.transformers.routers import own_loss

Gradients = Mapping[str, Tensor]
"""Gradients by parameter name; a parameter without one is absent."""


@dataclass(frozen=True)
class Truth:
    """Loss of each predicted token [N], in document order, and the gradients of the loss.

    Args:
        auxiliary: what the router's auxiliary loss adds.
    """

    losses: Tensor
    gradients: Gradients
    auxiliary: float = 0.0

    @property
    def loss(self) -> float:
        """Mean over the predicted tokens, and what is added to it."""
        return float(self.losses.sum()) / max(len(self.losses), 1) + self.auxiliary


def truth_of(model: nn.Module, sample: Sample, shows_length: bool, exact: bool = True) -> Truth:
    """Run a plain model on each document alone and add up the gradients.

    Args:
        shows_length: the model chooses rotary frequencies by the largest position it is shown; show it the batch's.
        exact: attention written out, without a fused kernel.
    """
    model.zero_grad(set_to_none=True)
    losses, routed, auxiliary = [], [], 0.0
    with sdpa_kernel(SDPBackend.MATH) if exact else nullcontext():
        for document in sample.documents:
            found, router_logits = _token_losses(model, sample, document, shows_length)
            routed.append(router_logits)
            if len(found):
                torch.autograd.backward(found.sum() / sample.targets, retain_graph=bool(router_logits))
                losses.append(found.detach())
        if any(routed):
            balance = _balance(model, routed)
            torch.autograd.backward(balance)
            auxiliary = float(balance.detach())
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Truth(torch.cat(losses), gradients, auxiliary)


def _balance(model: Any, routed: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """Return what the router's auxiliary loss of all documents together adds to the loss."""
    joined = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
    loss: Any = own_loss(model)
    return model.router_aux_loss_coef * loss(joined, model.num_experts, model.num_experts_per_tok)


def _token_losses(
    model: nn.Module, sample: Sample, document: Document, shows_length: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the cross-entropy of each predicted token of a document, from its logits, and those of its routers."""
    labels = sample.labels(document)[1:]
    predicted = labels != IGNORED
    device = next(model.parameters()).device
    ids = sample.ids[document.row : document.row + 1, document.start : document.stop].to(device)
    positions = torch.arange(len(document), device=device)[None]
    if shows_length:  # a second row further on, whose logits are not used
        ids, positions = (
            ids.expand(2, -1),
            torch.cat([positions, positions + sample.largest_position - len(document) + 1]),
        )
    images = {name: value.to(device) for name, value in sample.images.get(document, {}).items()}
    out: Any = model(input_ids=ids, position_ids=None if images else positions, use_cache=False, **images)
    losses = F.cross_entropy(out.logits[0, :-1].float()[predicted], labels[predicted].to(device), reduction="none")
    return losses, tuple(layer[: len(document)] for layer in getattr(out, "router_logits", None) or ())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation, without gradients, and back to training."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()

"""A rank whose tokens have no target: its mean loss is 0 of 0, and shall add nothing."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class LossWithoutTargets:
    """Stands in for the `loss_function` of a model: 0 with zero gradients, not NaN, where there is no target."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss = self.original(*args, **kwargs)
        targets = kwargs.get("shift_labels")
        if targets is None:
            labels = kwargs.get("labels", args[1] if len(args) > 1 else None)
            targets = labels[..., 1:] if isinstance(labels, Tensor) else None
        if not isinstance(loss, Tensor) or not isinstance(targets, Tensor):
            return loss
        some = (targets != kwargs.get("ignore_index", -100)).any().to(loss.device)
        return torch.where(some, loss, torch.zeros_like(loss))


class Losses:
    """The models whose `loss_function` was replaced, on the instance alone; undoes it."""

    def __init__(self) -> None:
        self._models: list[tuple[weakref.ref[PreTrainedModel], Any]] = []

    def guard_caller(self) -> None:
        """Guard the causal language models whose forward is running: attention knows no other way to its model."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            model = frame.f_locals.get("self")
            if isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None:
                self.guard(model)
            frame = frame.f_back

    def guard(self, model: PreTrainedModel) -> None:
        """Replace the loss function of a model, once."""
        if isinstance(model.loss_function, LossWithoutTargets | torch.nn.Module):
            return
        own = vars(model).get("_loss_function")
        self._models.append((weakref.ref(model), own))
        model.loss_function = LossWithoutTargets(model.loss_function)

    def restore(self) -> None:
        """Give the models their own loss functions back."""
        for ref, own in self._models:
            model = ref()
            if model is None:
                continue
            if own is None:
                vars(model).pop("_loss_function", None)
            else:
                model.loss_function = own
        self._models.clear()

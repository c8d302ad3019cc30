"""Take one optimizer step, and measure it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan.config import RunConfig
from longspan.errors import TrainingError
from longspan.train.metrics import Row
from longspan.train.packing import Step
from longspan.train.pulse import Pulse
from longspan.train.schedule import learning_rate
from longspan.train.state import numbers, set_numbers
from longspan.train.supply import Supply
from longspan.train.trainee import Trainee


@dataclass(frozen=True)
class Taken:
    """A step that has been taken, or skipped as it is not finite; the same on all ranks.

    Args:
        flags: which of the flags that were asked for some process has set; after them, whether some process has no data
            for the next step.
    """

    row: Row
    flags: tuple[bool, ...]


def run_step(
    trainee: Trainee,
    step: Step,
    number: int,
    config: RunConfig,
    pulse: Pulse,
    supply: Supply,
    flags: Callable[[], tuple[bool, ...]],
) -> Taken:
    """Take a step. One that is not finite is skipped: parameters, optimizer and random numbers are as they were, unless
    the engine or a step inside backward has applied it already.

    Args:
        supply: of the next step's data, which is made ready while the device works on this step.
        flags: asked at the end of the step, for what one process alone may know.
    """
    meter = trainee.meter
    lr = learning_rate(number, config)
    before = numbers(trainee.device)
    trainee.stepping.begin(lr)
    loss = _backward(trainee, step, pulse)
    pulse.enter("optimizer")
    with meter.phase("optimizer"):
        norm = trainee.stepping.norm()
    pulse.enter("reading data")
    with meter.phase("data"):
        failed = supply.look_ahead()
    pulse.enter("optimizer")
    loss_value, norm_value = torch.stack(
        [loss.double(), norm.double().to(loss.device)]
    ).tolist()  # the step's host sync
    finite = math.isfinite(loss_value) and math.isfinite(norm_value)
    if finite:
        with meter.phase("optimizer"):
            trainee.stepping.finish()
    else:
        trainee.stepping.optimizer.zero_grad(set_to_none=True)
        set_numbers(trainee.device, before)
    row, agreed = meter.row(number, step, *flags(), failed, loss=loss_value, grad_norm=norm_value, lr=lr)
    return Taken(row if finite else replace(row, skipped=True), agreed)


def not_finite(row: Row, config: RunConfig, applied_early: bool, in_a_row: int) -> TrainingError:
    """Return the error of a step that is not finite, and is one too many."""
    fate = "applied all the same; no model is saved" if applied_early else "not applied"
    skipped = ""
    if config.faults.on_nonfinite == "skip":
        skipped = f" It is number {in_a_row} in a row; faults.max_skipped_steps is {config.faults.max_skipped_steps}."
    return TrainingError(
        f"Step {row.step}: loss {row.loss}, gradient norm {row.grad_norm}. The step was {fate}.{skipped} "
        f"Lower optimizer.lr ({config.optimizer.lr:g}), lengthen schedule.warmup_steps, or look at the data."
    )


def _backward(trainee: Trainee, step: Step, pulse: Pulse) -> Tensor:
    """Run a step's micro-batches forward and backward, and use them up; return its loss, the same on every rank."""
    loss = torch.zeros((), device=trainee.device)
    phase = trainee.meter.phase
    while step.micro_batches:
        pulse.enter("forward")
        part = step.micro_batches.pop(0)  # not kept: with it goes what layers have worked out on the device for it
        with phase("data"):
            part = {k: v.to(trainee.device) if isinstance(v, Tensor) else v for k, v in part.items()}
        with trainee.engine.accumulating(last=not step.micro_batches):
            with phase("forward"):
                out = trainee.module(**part)
            pulse.enter("backward")
            with phase("backward"):
                trainee.engine.backward(out.loss)
        loss += out.loss.detach()
    pulse.enter("reducing gradients")
    with phase("reduce"):
        trainee.engine.reduce()
    return loss

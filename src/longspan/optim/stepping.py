"""When a step is taken: after backward, or inside it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.engines.protocol import Engine, StepsItself
from longspan.errors import ConfigError, TrainingError
from longspan.kernels.protocol import wide
from longspan.optim.build import set_learning_rate
from longspan.optim.host import HostAdamW


class Stepping(Protocol):
    """One optimizer step, in a fixed order of calls: `begin`, forward and backward, `norm`, `finish`."""

    optimizer: torch.optim.Optimizer

    def begin(self, lr: float) -> None:
        """Set the learning rate of the step that follows."""
        ...

    def norm(self) -> Tensor:
        """Clip, where that is still to be done, and return the gradients' global norm before clipping."""
        ...

    def finish(self) -> None:
        """Have the step applied and the gradients gone."""
        ...

    @property
    def applied_early(self) -> bool:
        """Whether the step whose norm has just been told is in the parameters already."""
        ...

    def carried(self) -> dict[str, Tensor]:
        """Return what a step leaves for the next one besides the optimizer's state, by names that begin `stepping.`."""
        ...

    def carry(self, left: dict[str, Tensor]) -> None:
        """Take what `carried` returned."""
        ...


class LeavesNothing:
    """What ways to step have in common that need nothing of the step before."""

    def carried(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}

    def carry(self, left: dict[str, Tensor]) -> None:
        """Do nothing."""


class StepAfterBackward(LeavesNothing):
    """Keep all gradients until backward has ended; clip by their own norm, and step all parameters.

    Args:
        max_norm: gradients of a larger global norm are scaled down to it; None: never.
    """

    applied_early = False

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, max_norm: float | None) -> None:
        self.optimizer, self._engine, self._max_norm = optimizer, engine, max_norm

    def begin(self, lr: float) -> None:
        """Set the learning rate."""
        set_learning_rate(self.optimizer, lr)

    def norm(self) -> Tensor:
        """Clip by the global norm."""
        return self._engine.clip_grad_norm(self._max_norm)

    def finish(self) -> None:
        """Step, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class StepByEngine(LeavesNothing):
    """Let the engine step: its norm is known once the step has been taken.

    Args:
        max_norm: gradients of a larger global norm are scaled down to it; None: never.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: StepsItself, max_norm: float | None) -> None:
        self.optimizer, self._engine = optimizer, engine
        engine.adopt(optimizer, max_norm)

    def begin(self, lr: float) -> None:
        """Set the learning rate."""
        set_learning_rate(self.optimizer, lr)

    def norm(self) -> Tensor:
        """Clip and step."""
        return self._engine.step()

    def finish(self) -> None:
        """Do nothing: the step has been taken."""

    @property
    def applied_early(self) -> bool:
        """Whether the engine has stepped, which it may leave out where gradients are not finite."""
        return self._engine.applied


class StepInBackward:
    """Step each parameter as soon as its gradient is whole, and drop the gradient: they never all exist at once.

    Backward runs once per step, in one process. A parameter that is used in several places, such as tied embeddings,
    steps once, as autograd adds up the uses before it reports the gradient.

    Args:
        max_norm: gradients are scaled by min(1, max_norm / the norm of the step before); the first step is not
            clipped. A step's own norm is known only after it has been applied. None: never.

    Raises:
        ConfigError: several processes, whose gradients would still be unlike, or parameters on several devices.

    Cost: no host sync. Gradients: what autograd makes at once, a decoder layer's or the head's.
    """

    applied_early = True

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> None:
        self.optimizer, self._max_norm = optimizer, max_norm
        self._groups = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        _check_alone(list(self._groups))
        self._squares: Tensor | None = None
        self._scale: Tensor | None = None
        self._stepped: set[nn.Parameter] | None = None
        self._hooks = [p.register_post_accumulate_grad_hook(self._step) for p in self._groups]

    def begin(self, lr: float) -> None:
        """Set the learning rate, and expect one backward."""
        set_learning_rate(self.optimizer, lr)
        self._scale = None if self._squares is None else self._factor(self._squares)
        self._squares, self._stepped = None, set()

    def norm(self) -> Tensor:
        """Return the norm of the gradients that backward has made, before clipping."""
        return torch.zeros(()) if self._squares is None else self._squares.sqrt()

    def finish(self) -> None:
        """Wait for what is still being applied."""
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.finish()
        self._stepped = None

    def carried(self) -> dict[str, Tensor]:
        """Return the norm that the next step is clipped by, squared."""
        return {} if self._squares is None else {"stepping.squares": self._squares}

    def carry(self, left: dict[str, Tensor]) -> None:
        """Clip the next step by that norm."""
        self._squares = left.get("stepping.squares")

    def remove(self) -> None:
        """Let gradients stay again."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    @torch.no_grad()
    def _step(self, parameter: nn.Parameter) -> None:
        """Take the gradient that a backward has just finished."""
        if self._stepped is None or parameter in self._stepped:
            raise TrainingError(
                "A gradient came outside a step, or twice in one. Stepping in backward takes one backward between "
                "begin and finish, over the whole step's loss; step after backward to accumulate gradients."
            )
        self._stepped.add(parameter)
        gradient = parameter.grad
        assert gradient is not None
        square = torch.linalg.vector_norm(gradient, dtype=wide(gradient.dtype)) ** 2
        self._squares = square if self._squares is None else self._squares + square
        if self._scale is not None:
            gradient.mul_(self._scale)
        group = self.optimizer.param_groups[self._groups[parameter]]
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.submit(parameter, group)
        else:
            _step_alone(self.optimizer, parameter, group)
        parameter.grad = None

    def _factor(self, squares: Tensor) -> Tensor | None:
        return None if self._max_norm is None else (self._max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)


def choose_stepping(
    optimizer: torch.optim.Optimizer, engine: Engine, in_backward: bool, max_norm: float | None
) -> Stepping:
    """Return how steps are taken: inside backward, after it, or by the engine.

    Raises:
        ConfigError: see `StepInBackward`.
    """
    if isinstance(engine, StepsItself):
        if in_backward:
            raise ConfigError(f"Engine {engine.name} steps itself, so steps cannot be taken in backward: use single.")
        return StepByEngine(optimizer, engine, max_norm)
    return StepInBackward(optimizer, max_norm) if in_backward else StepAfterBackward(optimizer, engine, max_norm)


def _check_alone(parameters: list[nn.Parameter]) -> None:
    """Refuse what gets its gradient after backward, or in parts.

    Raises:
        ConfigError: with the way out.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        raise ConfigError(
            f"Stepping in backward serves one process, but there are {world_size}, whose gradients are reduced after "
            "it: start one process, or step after backward."
        )
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        raise ConfigError(f"Stepping in backward needs all parameters on one device, found {', '.join(devices)}.")
    if any(isinstance(p, DTensor) for p in parameters):
        raise ConfigError("Stepping in backward needs whole parameters: use engine single, or step after backward.")


def _step_alone(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: dict[str, object]) -> None:
    """Let an optimizer see one parameter only."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups

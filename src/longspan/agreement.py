"""Have all processes do their part of something, or none go on: where one fails, all raise, so that nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from longspan import errors
from longspan.errors import BatchError, LongspanError, TopologyError, TrainingError
from longspan.mesh import Axis

T = TypeVar("T")
U = TypeVar("U")

_Told = tuple[str | None, str, Any]
"""What a process says of its part: its problem if it has one, the error's kind, and what it returned."""


@dataclass(frozen=True)
class Agreement:
    """Something that all processes do together, part by part; where one fails, all raise the same error.

    Args:
        doing: what, as in "cannot <doing>".
        after: what holds all the same, or what to do about it.
    """

    doing: str
    after: str

    def __call__(self, act: Callable[[], T]) -> list[T]:
        """Let every process act, without any collective in it; return what each returned, by rank. Collective.

        Raises:
            LongspanError: some process could not; the first of them is named. It is of that one's kind, TrainingError
                for what is not longspan's own.

        Cost: an all-gather of objects.
        """
        error, everyone = _outcomes(act)
        for rank, (problem, kind, _) in enumerate(everyone):
            if problem is not None:
                stop = "" if problem.endswith((".", "?")) else "."
                said = f"Cannot {self.doing}: process {rank} says {problem}{stop} {self.after}"
                raise getattr(errors, kind)(said) from error
        return [result for _, _, result in everyone]


def decide_together(decide: Callable[[], T], tell: Callable[[T], U], doing: str) -> tuple[T, list[U]]:
    """Decide on each process -> this one's decision, and what each tells of its own. Collective over the default group.

    Args:
        decide: holds no collective.
        doing: what a process that raised cannot do, and what becomes of the others.

    Raises:
        Exception: this process's own.
        TopologyError: another process raised; the first of them is named.

    Cost: an all-gather of objects.
    """
    decided: list[T] = []

    def act() -> U:
        decided.append(decide())
        return tell(decided[0])

    error, everyone = _outcomes(act)
    if error is not None:
        raise error
    for rank, (problem, _, _) in enumerate(everyone):
        if problem is not None:
            raise TopologyError(f"Process {rank} cannot {doing}: {problem}")
    return decided[0], [told for _, _, told in everyone]


def refuse_together(error: Exception | None, axis: Axis) -> NoReturn:
    """Raise on all ranks of an axis, some of which cannot use their batch: a rank's own error, or what the first says.

    Args:
        error: why this rank cannot; None if it can.

    Raises:
        Exception: this rank's own.
        BatchError: of another rank.

    Cost: an all-gather of objects over the axis.
    """
    found: list[Any] = [None] * axis.size
    if axis.size > 1:
        dist.all_gather_object(found, None if error is None else _said(error), group=axis.group)
    if error is not None:
        raise error
    rank, said = next((rank, said) for rank, said in enumerate(found) if said is not None)
    raise BatchError(f"Data rank {rank} (process {axis.ranks[rank]}) cannot use its batch: {said}")


def partner_refuses(refuses: bool) -> BatchError | None:
    """Return the error of a rank, one of whose partners in a sequence cannot use the batch that they share."""
    return BatchError("Another rank of this sequence cannot use its batch; its error says why.") if refuses else None


def _outcomes(act: Callable[[], Any]) -> tuple[Exception | None, list[_Told]]:
    """Let every process act -> this one's error, and what all say."""
    error: Exception | None = None
    try:
        told: _Told = (None, "", act())
    except Exception as raised:  # whatever it is, the others would wait
        error = raised
        told = (_said(raised), _kind(raised), None)
    everyone: list[Any] = [told]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, told)
    return error, everyone


def _kind(error: Exception) -> str:
    """Return the name of the error of `longspan.errors` that stands for an error."""
    return next((c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__), TrainingError.__name__)


def _said(error: Exception) -> str:
    """Say what went wrong; what the system said, where torch has put a complaint of its own on top."""
    if isinstance(error, LongspanError):
        return str(error)
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError):
            return f"{type(below).__name__}: {below}"[:500]
        below = below.__cause__ or below.__context__
    return f"{type(error).__name__}: {error}"[:500]

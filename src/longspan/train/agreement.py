"""Have all processes do their part of something, or none of them go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from longspan.errors import LongspanError, TrainingError

T = TypeVar("T")


@dataclass(frozen=True)
class Agreement:
    """Something that all processes do together, part by part: where one fails, all raise, so that nobody waits.

    Args:
        doing: what, as in "cannot <doing>".
        after: what holds all the same, or what to do about it.
    """

    doing: str
    after: str

    def __call__(self, act: Callable[[], T]) -> list[T]:
        """Let every process act, without any collective in it; return what each returned, by rank. Collective.

        Raises:
            TrainingError: some process could not; the first of them is named.

        Cost: an all-gather of objects.
        """
        error: Exception | None = None
        told: tuple[str | None, Any] = (None, None)
        try:
            told = (None, act())
        except Exception as raised:
            error = raised
            told = (_said(raised), None)
        everyone: list[Any] = [told]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, told)
        for rank, (problem, _) in enumerate(everyone):
            if problem is not None:
                raise TrainingError(
                    f"Cannot {self.doing}: process {rank} says {problem[:500]}. {self.after}"
                ) from error
        return [result for _, result in everyone]


def _said(error: Exception) -> str:
    """Say what went wrong; what the system said, where torch has put a complaint of its own on top."""
    if isinstance(error, LongspanError):
        return str(error)
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError):
            return f"{type(below).__name__}: {below}"
        below = below.__cause__ or below.__context__
    return f"{type(error).__name__}: {error}"

"""What ranks that copy into each other's memory share: slots of that memory, and queues of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

Copy = tuple[Tensor, Tensor]
"""Destination and source, views [B, n, h, D] of one shape; the last two dims of each lie dense."""


class SharedMemoryError(RuntimeError):
    """Some rank cannot share its memory; every rank of the axis raises it."""


class Slots:
    """Equal parts of the memory of each rank, used in turn.

    Args:
        buffers: of each rank, its slots, uint8 [bytes].
        kept: what must live as long.
    """

    def __init__(self, buffers: Sequence[Sequence[Tensor]], kept: Any = None) -> None:
        self.buffers, self.kept = buffers, kept
        self.count, self.bytes = len(buffers[0]), buffers[0][0].numel()
        self.turn = 0
        self._ends: deque[tuple[Any, Any]] = deque(maxlen=self.count)

    def take(self) -> int:
        """Return the number of the next slot."""
        self.turn += 1
        return (self.turn - 1) % self.count

    def end(self, met: Any, copied: Any) -> None:
        """Remember the marks of a turn's meeting and of its copies within the rank."""
        self._ends.append((met, copied))

    def met(self, ago: int) -> list[Any]:
        """Return the mark of the meeting so many turns ago, if there was such a turn."""
        return [self._ends[-ago][0]] if len(self._ends) >= ago else []

    def copied(self, ago: int) -> list[Any]:
        """Return the mark of the copies so many turns ago, if there was such a turn."""
        return [self._ends[-ago][1]] if len(self._ends) >= ago else []


class Link(Protocol):
    """What the ranks of an axis share, and three queues of work on each rank: the caller's own, one that pushes and in
    which the ranks meet, and one that copies within the rank.

    Work of one queue runs in order. A mark stands for the end of something queued; `after` are marks to wait for.
    """

    size: int
    rank: int

    def allocate(self, count: int, slot_bytes: int) -> Slots:
        """Return memory that all ranks share. Collective.

        Raises:
            SharedMemoryError: on every rank, if one of them cannot.
        """
        ...

    def ready(self) -> Any:
        """Return a mark of what the caller has queued so far."""
        ...

    def push(self, after: Sequence[Any], copies: Sequence[Copy]) -> None:
        """Queue copies into the memory of other ranks, which the next meeting ends."""
        ...

    def meet(self, after: Sequence[Any]) -> Any:
        """Queue a meeting of all ranks behind the pushes -> mark; it makes all that they did before visible."""
        ...

    def copy(self, after: Sequence[Any], copies: Sequence[Copy]) -> Any:
        """Queue copies within this rank -> mark."""
        ...

    def wait(self, mark: Any) -> None:
        """Make the caller's later work wait for a mark."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether a mark has been reached, without waiting."""
        ...

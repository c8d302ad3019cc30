"""The data of optimizer steps, one step ahead of the one at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from longspan.agreement import Agreement
from longspan.errors import LongspanError
from longspan.mesh import Axis
from longspan.train.packing import Step


class Supply:
    """Yields steps whose micro-batches are cut into this rank's parts. What one replica cannot use, all refuse alike.

    Ranks of a replica fail together, those of other replicas would wait for them in the step's first collective. So a
    step is read and cut before the one before it ends: that one's all-reduce tells all processes whether some has
    failed, and only then, and before the first step, they ask each other.

    Args:
        steps: of full batches.
        shard: cuts a batch, as `handle.shard`.
        data: the axis of replicas.
        number: of the first step.

    Raises:
        LongspanError: while iterating, on all processes: what the first that failed says, of that error's kind.
    """

    def __init__(self, steps: Iterator[Step], shard: Callable[..., dict[str, Any]], data: Axis, number: int) -> None:
        self._steps, self._shard, self._data, self._number = steps, shard, data, number
        self._next: Future[Step | None] | None = None
        self._all_have = False

    def look_ahead(self) -> bool:
        """Read and cut the next step, unless that is done; return whether it failed. No collective."""
        if self._next is None:
            self._next = Future()
            try:
                step = next(self._steps, None)
                self._next.set_result(None if step is None else self._cut(step))
            except Exception as error:  # raised when the step is taken, by all processes
                self._next.set_exception(error)
        return self._next.exception() is not None

    def told(self, failed: bool) -> None:
        """Hear whether some process has failed to look ahead."""
        self._all_have = not failed

    def __iter__(self) -> Supply:
        return self

    def __next__(self) -> Step:
        """Return the next step. Cost: an all-gather of objects, unless all processes are known to have it."""
        self.look_ahead()
        ahead, self._next = self._next, None
        assert ahead is not None
        if not self._all_have:
            self._agree(ahead)
        self._all_have, self._number = False, self._number + 1
        step = ahead.result()
        if step is None:
            raise StopIteration
        return step

    def _agree(self, ahead: Future[Step | None]) -> None:
        """Raise on all processes if some has failed; what is no error of longspan's own as it is, where it came."""
        try:
            Agreement(f"take step {self._number}", "Earlier steps and their checkpoints stand.")(
                lambda: ahead.result() is None
            )
        except LongspanError:
            if not isinstance(ahead.exception(), LongspanError | None):
                ahead.result()
            raise

    def _cut(self, step: Step) -> Step:
        """Cut the micro-batches of a step.

        Raises:
            LongspanError: one that cannot be used, and which.
        """
        parts, count = [], len(step.micro_batches)
        for index, batch in enumerate(step.micro_batches):
            try:
                parts.append(self._shard(batch, num_items=step.num_items))
            except LongspanError as error:
                where = f"replica {self._data.rank}" if self._data.size > 1 else "its data"
                raise type(error)(f"micro-batch {index + 1} of {count} of {where}: {error}") from error
        return replace(step, micro_batches=parts)

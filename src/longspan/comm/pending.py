"""Results of communication that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

from longspan.stopwatch import Stopwatch

EXCHANGE = "exchange"
"""What waiting is counted as."""

T = TypeVar("T")
R = TypeVar("R")


class Pending(Generic[T]):
    """Something that other ranks are sending; work done before `wait` overlaps with it.

    Args:
        requests: what torch.distributed returned; each is awaited once.
        finish: makes the result of what has arrived, when it is asked for.
        held: what must live until then, such as the buffer being sent.
        waits: counts how long requests are awaited; None where there are none.
    """

    def __init__(
        self, requests: Sequence[Any], finish: Callable[[], T], held: Any = None, waits: Stopwatch | None = None
    ) -> None:
        self._requests, self._finish, self._held = list(requests), finish, held
        self._waits = waits

    def wait(self) -> T:
        """Return the result once it is here; on a GPU the host goes on and the current stream waits.

        It is handed out once, and nothing of it stays behind: its memory is the caller's to free.
        """
        if self._requests:
            with self._waits.span(EXCHANGE) if self._waits else nullcontext():
                for request in self._requests:
                    request.wait()
        finish, self._finish = self._finish, _taken
        result = finish()
        self._requests, self._held = [], None
        return result

    def then(self, function: Callable[[T], R]) -> Pending[R]:
        """Return what `function` will make of the result."""
        return Pending([], lambda: function(self.wait()))


def _taken() -> Any:
    raise RuntimeError("This result has been taken already.")

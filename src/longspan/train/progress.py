"""Show a run while it trains: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from longspan.train.metrics import Row


class Progress:
    """Show every n-th step, and the first and last.

    Args:
        stream: where to write; a terminal gets a live line.
        max_steps: steps of the run.
        every: show every n-th step.
    """

    def __init__(self, stream: TextIO, max_steps: int, every: int = 1) -> None:
        self._stream, self._max_steps, self._every = stream, max_steps, every
        self._elapsed_s, self._taken, self._skipped = 0.0, 0, 0
        self._live = Live(console=Console(file=stream), auto_refresh=False) if stream.isatty() else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Write a line that stays."""
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def step(self, row: Row) -> None:
        """Show a step."""
        self._elapsed_s, self._taken = self._elapsed_s + row.step_s, self._taken + 1
        if row.skipped:
            self._skipped += 1
            self.note(
                f"step {row.step} is skipped: loss {row.loss}, gradient norm {row.grad_norm} ({self._skipped} skipped)"
            )
            return
        if row.step % self._every and row.step not in (1, self._max_steps):
            return
        text = describe(row, self._max_steps, self._elapsed_s * row.step / self._taken)
        if self._live is not None:
            self._live.update(Text(text), refresh=True)
        else:
            print(text, file=self._stream, flush=True)


def describe(row: Row, max_steps: int, elapsed_s: float) -> str:
    """Say a step in one line."""
    left_s = elapsed_s / row.step * (max_steps - row.step)
    parts = [
        f"step {row.step:>{len(str(max_steps))}}/{max_steps}",
        f"loss {row.loss:.4f}",
        f"grad norm {row.grad_norm:.3f}",
        f"lr {row.lr:.2e}",
        f"{row.tokens_per_s:,.0f} tokens/s",
    ]
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    if row.peak_gpu_bytes:
        parts.append(f"GPU {_gib(row.peak_gpu_bytes)}")
    return "  ".join([*parts, f"host {_gib(row.peak_host_bytes)}", f"left {duration(left_s)}"])


def duration(seconds: float) -> str:
    """Write a duration as 42s, 3m07s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / 2**30:.1f} GiB"

"""Show a run while it trains: a panel that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TextIO

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from longspan.report.words import duration, gib
from longspan.train.metrics import Row

_BARS = "▁▂▃▄▅▆▇█"
_LOSSES = 20


class Progress:
    """Show every n-th step, and the first and last.

    Args:
        stream: where to write; a terminal gets a panel.
        max_steps: steps of the run.
        every: show every n-th step.
    """

    def __init__(self, stream: TextIO, max_steps: int, every: int = 1) -> None:
        self._stream, self._max_steps, self._every = stream, max_steps, every
        self._elapsed_s, self._taken, self._skipped = 0.0, 0, 0
        self._losses: deque[float] = deque(maxlen=_LOSSES)
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
        self._losses.append(row.loss)
        if row.step % self._every and row.step not in (1, self._max_steps):
            return
        left_s = self._elapsed_s / self._taken * (self._max_steps - row.step)
        if self._live is not None:
            self._live.update(panel(row, self._max_steps, left_s, list(self._losses)), refresh=True)
        else:
            print(describe(row, self._max_steps, left_s), file=self._stream, flush=True)


def describe(row: Row, max_steps: int, left_s: float) -> str:
    """Say a step in one line."""
    parts = [
        f"step {row.step:>{len(str(max_steps))}}/{max_steps}",
        f"loss {row.loss:.4f}",
        f"grad norm {row.grad_norm:.3f}",
        f"lr {row.lr:.2e}",
        f"{row.tokens_per_s:,.0f} tokens/s",
    ]
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    if row.exchange_s:
        parts.append(f"communication {row.exchange_share:.1%}")
    if row.peak_gpu_bytes:
        parts.append(f"GPU {gib(row.peak_gpu_bytes)}")
    return "  ".join([*parts, f"host {gib(row.peak_host_bytes)}", f"left {duration(left_s)}"])


def panel(row: Row, max_steps: int, left_s: float, losses: Sequence[float]) -> RenderableType:
    """Draw a step: how far the run is, what it learns, how fast it is, and what it holds."""
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    head.add_row(
        Text(f"step {row.step:,}/{max_steps:,}", style="bold"),
        ProgressBar(total=max_steps, completed=row.step),
        f"left {duration(left_s)}",
    )
    unknown = "–"
    loss = Text.assemble((f"{row.loss:.4f}", "bold"), " ", (sparkline(losses), "cyan"))
    full = "" if row.mfu_full is None else f" ({row.mfu_full:.1%} full)"
    left = {
        "loss": loss,
        "grad norm": f"{row.grad_norm:.3f}",
        "lr": f"{row.lr:.2e}",
        "peak GPU": gib(row.peak_gpu_bytes) if row.peak_gpu_bytes else unknown,
        "peak host": gib(row.peak_host_bytes),
    }
    right = {
        "tokens/s": f"{row.tokens_per_s:,.0f}",
        "MFU": unknown if row.mfu is None else f"{row.mfu:.1%}{full}",
        "step": f"{row.step_s:.2f} s",
        "fwd / bwd": f"{row.forward_s:.2f} / {row.backward_s:.2f} s",
        "communication": f"{row.exchange_share:.1%}",
    }
    body = Columns([_pairs(left), _pairs(right)], padding=(0, 3))  # below each other where they are too wide
    return Panel(Group(head, Text(), body), box=box.ROUNDED, title="longspan", title_align="left", border_style="dim")


def _pairs(values: Mapping[str, str | Text]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True)
    for name, value in values.items():
        table.add_row(name, value)
    return table


def sparkline(values: Sequence[float]) -> str:
    """Draw numbers as bars of one line, the lowest and the highest of them at its edges."""
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in values)

"""Where a process is in its run."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """A phase of a step.

    Args:
        step: the step at hand; 0 before the first.
        since_s: when the phase began, on the monotonic clock.
    """

    step: int
    phase: str
    since_s: float

    def __str__(self) -> str:
        return f"{f'step {self.step}' if self.step else 'the beginning'}, {self.phase}"


class Pulse:
    """Told by the training thread what it does, and read by others at any time.

    A run *beats* with the end of each step; what takes long between two beats hangs.
    """

    def __init__(self) -> None:
        self.beat_s = time.monotonic()
        self.now = Moment(0, "building the model", self.beat_s)
        self.steps = 0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase, of the step at hand or of another one."""
        self.now = Moment(self.now.step if step is None else step, phase, time.monotonic())

    def beat(self) -> None:
        """End a step."""
        self.steps, self.beat_s = self.steps + 1, time.monotonic()

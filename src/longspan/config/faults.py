"""What a run does when something goes wrong."""

from __future__ import annotations

from typing import Literal

from longspan.config.section import Float, Int, Section, field


class FaultsConfig(Section):
    """What stops a run, and when."""

    timeout_minutes: Float = field(
        "A process whose step does not end within this time writes where it stands to output_dir/watchdog-rank<n>.txt "
        "and ends with exit code 1; the first step, in which code is compiled, may take three times as long. Set it "
        "above the time of your longest step.",
        30.0,
        unit="minutes",
        example=30,
        gt=0,
        le=525_600,
    )
    on_nonfinite: Literal["stop", "skip"] = field(
        "A step whose loss or gradient norm is not finite: 'stop' ends the run; 'skip' leaves it out on all processes "
        "and goes on with the next.",
        "stop",
        example="skip",
    )
    max_skipped_steps: Int = field(
        "With on_nonfinite: skip, steps in a row that may be left out; one more ends the run.",
        3,
        unit="steps",
        example=3,
        ge=1,
    )

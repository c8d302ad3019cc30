"""What is shown and logged while a run trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from longspan.config.section import Int, Section, one_or_many
from longspan.config.section import field as _field

LoggerName = Literal["tensorboard", "wandb", "trackio"]
"""Where metrics can go besides metrics.jsonl; also the name of the pip package."""


class LoggingConfig(Section):
    """What is shown and logged while training; metrics.jsonl gets every step all the same."""

    every: Int = _field("Show every n-th step.", 1, unit="steps", example=10, ge=1)
    to: Annotated[tuple[LoggerName, ...], BeforeValidator(one_or_many)] | None = _field(
        "Also log every step to 'tensorboard' (output_dir/tensorboard), 'wandb', 'trackio', or several of them; []: "
        "none; null: TensorBoard where it is installed.",
        None,
        example="[tensorboard, wandb]",
    )
    project: str = _field(
        "Project that wandb and trackio show the run in.", "longspan", example="longspan", min_length=1
    )

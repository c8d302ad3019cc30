"""`longspan train`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.allocator import choose_allocator
from longspan.cli.flags import with_settings
from longspan.cli.launchers import launched
from longspan.config import load_config
from longspan.errors import ConfigError


@with_settings
def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.", metavar="RUN.YAML", show_default=False)],
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Processes to start here (a whole number >= 1; default: one per GPU, without a GPU "
            "sequence_parallel_size). Under a launcher its processes are used.",
            min=1,
            metavar="N",
        ),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Last line as JSON; progress goes to stderr. (default false)")
    ] = False,
    *,
    overrides: dict[tuple[str, ...], Any],
) -> None:
    """Train a model. The last line of stdout names the output folder.

    Every setting of the YAML file can be replaced by its flag.
    """
    choose_allocator()
    from longspan.cli import launch  # torch and transformers load here, so that --help is quick

    run = load_config(config, overrides)
    progress = sys.stderr if json_ else sys.stdout
    if launched():
        if nproc is not None:
            raise ConfigError("--nproc starts processes, but a launcher has started them already; leave it out.")
        last = launch.join(run, to_stderr=json_)
        if last is None:
            return
    else:
        last = launch.start(run, nproc or launch.default_processes(run), progress)
    if json_:
        print(json.dumps({"output_dir": run.output_dir, "steps": last}))
    else:
        print(f"output_dir: {run.output_dir}")

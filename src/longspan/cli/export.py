"""`longspan export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run's output folder, or the folder of a saved model or adapter.",
            metavar="RUN_OR_CHECKPOINT",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write, new or empty.", show_default=False)],
    merge: Annotated[
        bool, typer.Option("--merge", help="Fold adapters into the model they were trained in. (default false)")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Last line as JSON. (default false)")] = False,
) -> None:
    """Write a run's model for other programs: safetensors, config.json, tokenizer. The last line names the folder."""
    from longspan.train.export import export as write  # torch and transformers load here, so that --help is quick

    what = write(source, out, merge)
    print(json.dumps({"out": str(out), "what": what}) if json_ else f"{what}: {out}")

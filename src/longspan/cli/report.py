"""`longspan report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    output_dir: Annotated[Path, typer.Argument(help="Output folder of a run.", metavar="OUT_DIR", show_default=False)],
    json_: Annotated[bool, typer.Option("--json", help="Last line as JSON. (default false)")] = False,
) -> None:
    """Write report.html from what a run has left, also if it was killed. The last line names the page."""
    from longspan.report import write_report

    path, verdict = write_report(output_dir)
    print(json.dumps({"report": str(path), "verdict": verdict}) if json_ else f"{verdict}\nreport: {path}")

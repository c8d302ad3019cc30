"""`longspan data`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.flags import with_settings
from longspan.config import InspectConfig, load_inspect_config

data = typer.Typer(name="data", help="Look at training data.", no_args_is_help=True)

_BAR_CHARACTERS = 40


def inspect(
    config: Annotated[
        Path | None,
        typer.Argument(help="A run's YAML file; flags alone do as well.", metavar="RUN.YAML", show_default=False),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else. (default false)")] = False,
    *,
    overrides: dict[tuple[str, ...], Any],
) -> None:
    """Say what a run would read: documents, lengths, targets, how full rows are, what is cut or left out, and why.

    No model and no GPU are needed. Exit code 2: `longspan train` would refuse the data, or a setting cannot be used.
    """
    found = examine(load_inspect_config(config, overrides))
    print(json.dumps(found.to_json())) if json_ else show(found)
    if found.report.refused or not found.report.pieces:
        print("Error: `longspan train` would refuse this data.", file=sys.stderr)
        raise typer.Exit(2)


data.command()(with_settings(inspect, InspectConfig))


def examine(config: InspectConfig) -> Any:
    """Read the data and return its overview."""
    from longspan.integrations.encoding import Encoder  # transformers loads here, so that --help is quick
    from longspan.integrations.tokenizer import load_tokenizer
    from longspan.train.data.overview import look_at

    tokenizer = load_tokenizer(config.data.tokenizer, config.data.chat_template)
    return look_at(config, Encoder(tokenizer, config.data.targets))


def show(overview: Any) -> None:
    """Print an overview for people."""
    from rich.bar import Bar
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    report, console = overview.report, Console()
    print(f"{report.documents:,} documents, {report.tokens:,} tokens")
    if overview.lengths is not None:
        low, median, most, high = overview.lengths
        print(f"lengths: shortest {low:,}, median {median:,}, nine in ten up to {most:,}, longest {high:,} tokens")
    table = Table("tokens", "", "documents", box=None, pad_edge=False)
    table.columns[0].justify = table.columns[2].justify = "right"
    highest = max((bar.documents for bar in overview.histogram), default=0)
    for bar in overview.histogram:
        block = Bar(highest, 0, bar.documents, width=_BAR_CHARACTERS)
        table.add_row(f"{bar.from_tokens:,} to {bar.to_tokens:,}", block, f"{bar.documents:,}")
    console.print(table)
    print(f"{report.piece_tokens:,} tokens to train on, {overview.targets_share:.1%} of them targets")
    for place, packed in enumerate(overview.packed):
        start = "otherwise" if place else f"rows of {overview.sequence_length:,} tokens"
        print(f"{start}, packing {packed.strategy}: {packed.rows:,} per epoch, {packed.fill:.1%} full")
    for line in report.fates():
        console.print(Text(line), soft_wrap=True)

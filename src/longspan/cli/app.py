"""The commands, and how an error of ours looks to a user: one message, no traceback, exit code 1 or 2."""

from __future__ import annotations

import sys

import typer

from longspan.cli.bench import bench
from longspan.cli.check import check
from longspan.cli.data import data
from longspan.cli.doctor import doctor
from longspan.cli.evaluate import evaluation
from longspan.cli.export import export
from longspan.cli.launchers import without_local_rank
from longspan.cli.plan import plan
from longspan.cli.report import report
from longspan.cli.train import train
from longspan.errors import LongspanError

app = typer.Typer(
    name="longspan",
    help="Train Hugging Face causal language models on very long sequences, exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(check)
app.command()(plan)
app.command()(export)
app.command()(report)
app.command()(doctor)
app.add_typer(bench)
app.add_typer(evaluation)
app.add_typer(data)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit 2: a setting, the data or the topology cannot be used; 1: the run failed.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    try:
        app(without_local_rank(sys.argv[1:] if arguments is None else arguments))
    except LongspanError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)

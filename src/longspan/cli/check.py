"""`longspan check`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from longspan.check.settings import Settings
from longspan.cli.flags import LoraRank, lora, size, with_flags
from longspan.cli.model import named_config
from longspan.cli.ranks import check_degrees, check_device, start
from longspan.errors import ConfigError, KernelError, LongspanError, ModelError


@dataclass(frozen=True)
class Flags:
    """The command line of `check`."""

    model: Annotated[
        str,
        typer.Option(
            help="A preset, a folder (its config.json is enough) or a hub id; weights are random.", metavar="NAME"
        ),
    ]
    sp: Annotated[
        int, typer.Option(help="Processes that share a sequence. (a whole number >= 1)", metavar="N", show_default=True)
    ] = 2
    ulysses: Annotated[
        int | None,
        typer.Option(
            help="Processes that exchange heads. (default: the automatic degrees and the other ways to divide --sp)",
            metavar="N",
        ),
    ] = None
    ring: Annotated[
        int | None,
        typer.Option(help="Processes that pass keys and values on. (default: as for --ulysses)", metavar="N"),
    ] = None
    packed: Annotated[
        bool, typer.Option("--packed", help="Packed documents only, also in several rows. (default false)")
    ] = False
    seq_len: Annotated[
        str | None,
        typer.Option(
            help="Tokens per row, any number; 2K is 2048. (default 40 x sp + 7, on GPUs up to 250 x sp + 7)",
            metavar="SIZE",
        ),
    ] = None
    layers: Annotated[
        int | None,
        typer.Option(help="Keep the model's first layers. (default 2, more to see each kind of layer)", metavar="N"),
    ] = None
    lora_rank: LoraRank = None
    device: Annotated[
        str, typer.Option(help="cpu, cuda or auto: cuda if there is a GPU per process.", metavar="NAME")
    ] = "auto"
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float64: equal to rounding. bfloat16: errors at most twice the plain model's own. "
            "(default float64 on cpu, bfloat16 on cuda)",
            metavar="NAME",
        ),
    ] = None
    row: Annotated[
        bool,
        typer.Option(
            "--row",
            help="Check all ways to divide and run the model, on 2, 3 and 4 CPU processes, and print its row for the "
            "table of models. (default false)",
        ),
    ] = False
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else. (default false)")] = False


@dataclass(frozen=True)
class CheckJob:
    """A check as its processes need it."""

    settings: Settings
    device: str

    grouped = False
    modules = ("longspan.check.run", "longspan.integrations.models")

    @property
    def processes(self) -> int:
        """As many as share a sequence."""
        return self.settings.sp

    def run(self, device: Any) -> dict[str, Any] | None:
        """Check, as one of the processes."""
        from longspan.check.run import run_check

        return run_check(named_config(self.settings.model), self.settings, device)


@dataclass(frozen=True)
class RowJob:
    """The part of a row that takes `processes` processes."""

    settings: Settings
    processes: int

    device = "cpu"
    grouped = False
    modules = ("longspan.check.row", "longspan.integrations.models")

    def run(self, device: Any) -> dict[str, Any] | None:
        """Check, as one of the processes."""
        from longspan.check.row import check_ways

        found = check_ways(named_config(self.settings.model), self.settings, self.processes)
        return None if found is None else {"found": found}


@with_flags(Flags)
def check(**flags: Any) -> None:
    """Compare loss, gradients, evaluation and document borders with the plain model on one process.

    Exit code 0: equal; 1: not equal, or the model is refused, and why; 2: it cannot be checked, and why.
    """
    given = Flags(**flags)
    try:
        result = run_row(given) if given.row else run(given)
    except (ModelError, KernelError) as error:
        print(f"Refused: {error}", file=sys.stderr)
        if given.json_:
            print(json.dumps({"ok": False, "cases": [], "refused": str(error)}))
        raise typer.Exit(1) from None
    except LongspanError as error:
        print(f"Error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if given.json_:
        print(json.dumps(result))
    elif given.row:
        print(result["row"])
    else:
        _show(result)
    if not result["ok"]:
        raise typer.Exit(1)


def run(flags: Flags) -> dict[str, Any]:
    """Start the processes and return their result: `ok`, `cases`, and what was checked.

    Raises:
        LongspanError: what the processes, or a look at the flags, found to be impossible.
    """
    check_degrees(flags.sp, flags.ulysses, flags.ring)
    tokens = None if flags.seq_len is None else size("--seq-len", flags.seq_len)
    check_device(flags.device)
    settings = Settings(
        flags.model, flags.sp, flags.ulysses, flags.ring, flags.packed, tokens, flags.layers, flags.dtype,
        adapter=lora(flags.lora_rank),
    )  # fmt: skip
    return start(CheckJob(settings, flags.device))


def run_row(flags: Flags) -> dict[str, Any]:
    """Start the processes of all ways and return `ok`, `row` and `cells`.

    Raises:
        LongspanError: what the processes, or a look at the flags, found to be impossible.
    """
    from longspan.check.row import WAYS, cells, row

    settings = Settings(flags.model, layers=flags.layers, sp=1)
    if flags != Flags(flags.model, layers=flags.layers, row=True, json_=flags.json_):
        raise ConfigError("--row chooses degrees, rows and type itself: give it --model, --layers and --json only.")
    name = type(named_config(flags.model)).__name__.removesuffix("Config")
    found: list[Any] = []
    for sp in sorted({way.sp for way in WAYS}):
        found += start(RowJob(settings, sp))["found"]
    made = cells(found)
    return {
        "ok": all(cell.exact for cell in made.values()),
        "row": row(name, flags.model, made),
        "cells": {column: {"said": cell.said, "why": cell.why} for column, cell in made.items()},
    }


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    low = any("baseline_loss_rel_err" in case for case in result["cases"])
    table = Table(box=None, pad_edge=False)
    for name in ("case", "ulysses", "ring", "loss", "worst gradient", "leak", "eval", ""):
        table.add_column(name, justify="left" if name in ("case", "") else "right", no_wrap=True)
    for case in result["cases"]:
        errors = [_figure(case, name) for name in ("loss_rel_err", "grad_rel_err", "leak", "eval_rel_err")]
        cells = [case["name"], str(case["ulysses"]), str(case["ring"]), *errors]
        table.add_row(*cells, "[green]ok[/]" if case["ok"] else "[red]FAILED[/]")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for case in result["cases"]:
        if not case["ok"]:
            console.print(
                f"{case['name']}: {'; '.join(case['why'])} (worst gradient: {case['worst_parameter']})", markup=False
            )
    adapted = f", {result['adapted']}" if result["adapted"] else ""
    narrowed = "".join(f", {name} cut to {width}" for name, width in result["narrowed"].items())
    print(
        f"{result['model']}: {result['layers']} layers{narrowed}{adapted}, random weights, {result['seq_len']} tokens "
        f"per row, {result['dtype']} on {result['device']}, kernel {result['kernel']}"
    )
    print(
        "relative errors against the plain model on one process, each document alone"
        + ("; in brackets the plain model's own in this dtype, of which twice is allowed" if low else "")
    )
    print("OK" if result["ok"] else "FAILED")


def _figure(case: dict[str, Any], name: str) -> str:
    value, own = case[name], case.get(f"baseline_{name}")
    shown = "nan" if value is None else str(value) if isinstance(value, int) else f"{value:.1e}"
    return shown if own is None else f"{shown} ({own:.1e})"

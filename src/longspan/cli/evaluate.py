"""`longspan eval`: what a model can do with long rows."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli.allocator import choose_allocator
from longspan.cli.flags import option, size, with_flags
from longspan.cli.launchers import launched
from longspan.cli.ranks import check_degrees, check_device, join, start
from longspan.errors import ConfigError, TopologyError
from longspan.evaluate.settings import ANSWER, NEEDLE, QUESTION, NeedleSettings
from longspan.files import write_whole

evaluation = typer.Typer(name="eval", help="Find out what a model can do with long rows.", no_args_is_help=True)

RESULT, PICTURE = "needle.json", "needle.png"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The command line of `eval needle`."""

    model: Annotated[
        str,
        option(
            "A folder, a run's output folder (adapters are folded in), a hub id, or a preset with random weights.",
            "NAME",
        ),
    ]
    lengths: Annotated[
        str,
        option("Tokens per row, prompt and answer together, separated by commas: 4K,32K,128K.", "SIZES"),
    ] = "4K,8K,16K,32K"
    depths: Annotated[str, option("Haystack before the needle, in percent, separated by commas.", "PERCENTS")] = (
        "0,25,50,75,100"
    )
    trials: Annotated[
        int, option("Rows per length and depth, each with another needle. (a whole number >= 1)", "N")
    ] = 3
    haystack: Annotated[
        list[str] | None,
        option(
            "Files or patterns (* ? **) of UTF-8 text, may be repeated; begun again where they are too short. "
            "(default: Python's standard library; ${stdlib} stands for its folder)",
            "FILES",
        ),
    ] = None
    needle: Annotated[
        str,
        option(f"The sentence to find, with {{key}} and {{value}}. (default {NEEDLE!r})", "TEXT", show_default=False),
    ] = NEEDLE
    question: Annotated[
        str,
        option(f"What is asked after the haystack, with {{key}}. (default {QUESTION!r})", "TEXT", show_default=False),
    ] = QUESTION
    answer: Annotated[
        str,
        option("How the answer reads: what stands before {value} is given, from there on it is scored.", "TEXT"),
    ] = ANSWER
    digits: Annotated[int, option("Digits of a value. (a whole number >= 1)", "N")] = 7
    seed: Annotated[int, option("Of keys, values and stretches of haystack.", "N")] = 0
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Put haystack and question into the tokenizer's chat template, and the answer into the model's turn. "
            "(default false)",
        ),
    ] = False
    tokenizer: Annotated[
        str | None, option("'bytes', a folder or a hub id. (default: the model's own; 'bytes' for a preset)", "NAME")
    ] = None
    allow_longer: Annotated[
        bool,
        typer.Option("--allow-longer", help="Also rows beyond the positions that the model knows. (default false)"),
    ] = False
    sp: Annotated[int, option("Processes that share a row. (a whole number >= 1)", "N")] = 1
    ulysses: Annotated[int | None, option("Processes that exchange heads. (default: chosen)", "N")] = None
    ring: Annotated[int | None, option("Processes that pass keys and values on. (default: chosen)", "N")] = None
    nproc: Annotated[
        int | None,
        option("Processes to start, a multiple of --sp; each --sp of them take other rows. (default: --sp)", "N"),
    ] = None
    kernel: Annotated[str, option("Attention kernel: auto or a name of `longspan doctor`.", "NAME")] = "auto"
    engine: Annotated[str, option("Who holds parameters: single (each process all of them) | fsdp2.", "NAME")] = (
        "single"
    )
    tile_tokens: Annotated[str, option("Tokens of a process on which a layer runs at a time.", "SIZE")] = "8K"
    device: Annotated[str, option("cpu, cuda or auto: cuda if there is a GPU per process.", "NAME")] = "auto"
    dtype: Annotated[
        str | None, option("float32 | bfloat16 | float64. (default bfloat16 on cuda, float32 on cpu)", "NAME")
    ] = None
    out: Annotated[Path, option(f"Folder for {RESULT} and {PICTURE}.", "FOLDER")] = Path("out/needle")
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier evaluation in --out. (default false)")
    ] = False
    no_plot: Annotated[
        bool, typer.Option("--no-plot", help="Draw no heat map, which needs matplotlib. (default false)")
    ] = False
    json_: Annotated[
        bool, typer.Option("--json", help=f"Print the content of {RESULT} and nothing else. (default false)")
    ] = False


@dataclass(frozen=True)
class NeedleJob:
    """An evaluation as its processes need it."""

    asked: Any
    processes: int
    device: str

    grouped = False
    modules = ("longspan.evaluate.run",)

    def run(self, device: Any) -> dict[str, Any] | None:
        """Evaluate, as one of the processes."""
        from longspan.evaluate.run import run_needle

        return run_needle(self.asked, device)


@evaluation.command()
@with_flags(Flags)
def needle(**flags: Any) -> None:
    """Hide a sentence at several depths of texts of several lengths, and see whether the model finds it.

    A row's prompt and answer go through the model in one pass, divided over the processes of --sp. The last line names
    the folder of the results. Exit code 2: something cannot be used, and why; 1: the run failed.
    """
    given = Flags(**flags)
    choose_allocator()
    result = run(given)
    if result is None:  # another process prints it
        return
    if given.json_:
        print(json.dumps(result))
        return
    show(result)
    print(f"out: {given.out}")


def run(flags: Flags) -> dict[str, Any] | None:
    """Start the processes, or be one of a launcher's; write the results and return them, on the first process.

    Raises:
        LongspanError: what the processes, or a look at the flags, found to be impossible.
    """
    from longspan.evaluate.heatmap import check_plotting, draw_heatmap

    job = job_of(flags)
    if (flags.out / RESULT).exists() and not flags.overwrite:
        raise ConfigError(f"--out {flags.out} holds an evaluation already. Name another folder, or pass --overwrite.")
    if flags.out.exists() and not flags.out.is_dir():
        raise ConfigError(f"--out {flags.out} is a file; name a folder.")
    if not flags.no_plot:
        check_plotting()
    result = join(job) if launched() else start(job)
    if result is None:
        return None
    flags.out.mkdir(parents=True, exist_ok=True)
    write_whole(flags.out / RESULT, json.dumps(result, indent=2) + "\n")
    if not flags.no_plot:
        draw_heatmap(f"Needle in a haystack: {result['model']}", result["cells"], flags.out / PICTURE)
    return result


def job_of(flags: Flags) -> NeedleJob:
    """Read the flags.

    Raises:
        LongspanError: one of them cannot be used.
    """
    from longspan.evaluate.run import Asked  # torch and transformers load here, so that --help is quick

    processes = flags.sp if flags.nproc is None else flags.nproc
    check_degrees(flags.sp, flags.ulysses, flags.ring)
    if processes < 1 or processes % flags.sp:
        raise TopologyError(f"--nproc must be a multiple of --sp {flags.sp}, got {processes}.")
    check_device(flags.device)
    settings = NeedleSettings(
        lengths=tuple(size("--lengths", text) for text in flags.lengths.split(",")),
        depths=tuple(_percent(text) for text in flags.depths.split(",")),
        trials=flags.trials,
        seed=flags.seed,
        digits=flags.digits,
        needle=flags.needle,
        question=flags.question,
        answer=flags.answer,
        chat=flags.chat,
        allow_longer=flags.allow_longer,
    )
    files = {} if flags.haystack is None else {"haystack": tuple(flags.haystack)}
    asked = Asked(
        settings,
        flags.model,
        **files,
        tokenizer=flags.tokenizer,
        sp=flags.sp,
        ulysses=flags.ulysses,
        ring=flags.ring,
        kernel=flags.kernel,
        engine=flags.engine,  # pyright: ignore[reportArgumentType]  (checked there)
        tile_tokens=size("--tile-tokens", flags.tile_tokens),
        dtype=flags.dtype,
    )
    return NeedleJob(asked, processes, flags.device)


def show(result: dict[str, Any]) -> None:
    """Print scores by depth and length, coloured, with the answers' mean log-probabilities."""
    from rich.console import Console
    from rich.table import Table

    from longspan.evaluate.heatmap import format_size, grid

    lengths, depths, _ = grid(result["cells"])
    cells = {(cell["depth"], cell["length"]): cell for cell in result["cells"]}
    table = Table(box=None, pad_edge=False)
    table.add_column("depth", justify="right")
    for length in lengths:
        table.add_column(format_size(length), justify="right", no_wrap=True)
    for depth in depths:
        table.add_row(f"{depth:g}%", *(_shown(cells[depth, length]) for length in lengths))
    print("needles found, and mean log-probability of the answers' tokens")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if result["haystack"]["repeated"]:
        print(f"the haystack has {result['haystack']['tokens']:,} tokens and was begun again for longer rows")
    degrees = f"ulysses {result['ulysses_degree']} x ring {result['ring_degree']}"
    print(
        f"{result['model']}: {result['score']:.1%} found; {result['dtype']} on {result['device']}, "
        f"{result['processes']} processes, {degrees}, kernel {result['kernel']}"
    )


def _shown(cell: dict[str, Any]) -> str:
    score = cell["score"]
    colour = "green" if score >= 0.9 else "yellow" if score >= 0.5 else "red"
    return f"[{colour}]{score:.0%}[/] [dim]{cell['mean_logp']:.2f}[/]"


def _percent(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--depths: {text!r} is not a number of percent.") from None

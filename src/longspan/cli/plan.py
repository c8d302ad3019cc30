"""`longspan plan`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from longspan.cli.flags import with_flags
from longspan.config import parse_size
from longspan.errors import ConfigError


@dataclass(frozen=True)
class Flags:
    """The command line of `plan`."""

    model: Annotated[
        str, typer.Option(help="A preset, a folder (its config.json is enough) or a hub id.", metavar="NAME")
    ]
    gpus: Annotated[
        str, typer.Option(help="Number and kind of GPUs, all of which share a sequence: 2xH200.", metavar="NxKIND")
    ]
    host_memory: Annotated[
        str | None,
        typer.Option(help="Memory of a node: 256GiB, 1.9TB. (default: nothing is kept on the host)", metavar="SIZE"),
    ] = None
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of a GPU: 80GiB. (default: that of its kind)", metavar="SIZE")
    ] = None
    gpus_per_node: Annotated[
        int, typer.Option(help="GPUs of a node. (a whole number >= 1)", metavar="N", show_default=True)
    ] = 8
    seq_len: Annotated[
        str | None,
        typer.Option(help="Tokens per row: 131072, 128K, 1M. (default: the longest that fit)", metavar="SIZE"),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            help="Who holds parameters: fsdp2 | ddp | single | zero-0 | zero-1 | zero-2 | zero-3.",
            metavar="NAME",
            show_default=True,
        ),
    ] = "fsdp2"
    optimizer: Annotated[
        str,
        typer.Option(
            help="adamw | adamw-host | adamw8bit | adamw-bf16-sr | auto: adamw, or adamw-host where it does not fit.",
            metavar="NAME",
            show_default=True,
        ),
    ] = "auto"
    json_: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else. (default false)")] = False


@with_flags(Flags)
def plan(**flags: Any) -> None:
    """Say what fits and how fast it is: the longest rows, or the fastest way to train on rows of a length.

    Nothing is run and no GPU is needed. Exit code 2: it does not fit, or a flag cannot be used, and why.
    """
    given = Flags(**flags)
    made = run(given)
    print(json.dumps(made.to_json()) if given.json_ else made.explain())


def run(flags: Flags) -> Any:
    """Return the plan that the flags ask for.

    Raises:
        LongspanError: a flag that cannot be used, a model that is not understood, or a length that does not fit.
    """
    from longspan.integrations.planning import cluster_for, task_for  # transformers loads here, so --help is quick
    from longspan.integrations.shapes import model_shape
    from longspan.plan.decide import make_plan
    from longspan.plan.library import parse_gpus
    from longspan.plan.machine import parse_bytes

    try:
        tokens = None if flags.seq_len is None else parse_size(flags.seq_len)
    except ValueError as error:
        raise ConfigError(f"--seq-len {flags.seq_len} is {error}.") from None
    count, machine = parse_gpus(flags.gpus)
    gpu_bytes = machine.memory_bytes if flags.gpu_memory is None else parse_bytes(flags.gpu_memory)
    host_bytes = 0 if flags.host_memory is None else parse_bytes(flags.host_memory)
    cluster = cluster_for(machine, count, flags.gpus_per_node, gpu_bytes, host_bytes)
    return make_plan(task_for(model_shape(flags.model), cluster, flags.engine, flags.optimizer), tokens)

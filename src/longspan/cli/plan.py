"""`longspan plan`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from longspan.cli.calibrate import calibrate, fitted
from longspan.cli.flags import amount, option, size, with_flags
from longspan.errors import ConfigError


@dataclass(frozen=True)
class Flags:
    """The command line of `plan`."""

    model: Annotated[str, option("A preset, a folder (its config.json is enough) or a hub id.", "NAME")]
    gpus: Annotated[str, option("Number and kind of GPUs: 2xH200; or 2xcpu.", "NxKIND")]
    host_memory: Annotated[
        str | None, option("Memory of a node: 256GiB, 1.9TB. (default: nothing is kept on the host)", "SIZE")
    ] = None
    gpu_memory: Annotated[str | None, option("Memory of a GPU: 80GiB. (default: that of its kind)", "SIZE")] = None
    gpus_per_node: Annotated[int, option("GPUs of a node. (a whole number >= 1)", "N", show_default=True)] = 8
    seq_len: Annotated[
        str | None,
        option("Tokens per row: 131072, 128K, or several: 32K,128K,1M. (default: the longest that fit)", "SIZES"),
    ] = None
    max_seq: Annotated[
        bool, typer.Option("--max-seq", help="Plan the longest rows that fit, as without --seq-len. (default false)")
    ] = False
    sp: Annotated[
        int | None,
        option(
            "GPUs that share a row, the others being data-parallel replicas. (default: what trains most tokens a "
            "second; for the longest rows all)",
            "N",
            min=1,
        ),
    ] = None
    engine: Annotated[
        str,
        option(
            "Who holds parameters: fsdp2 | ddp | single | zero-0 | zero-1 | zero-2 | zero-3.", "NAME", show_default=True
        ),
    ] = "fsdp2"
    optimizer: Annotated[
        str,
        option(
            "adamw | adamw-host | adamw8bit | adamw-bf16-sr | auto: adamw, or adamw-host where it does not fit.",
            "NAME",
            show_default=True,
        ),
    ] = "auto"
    lora_rank: Annotated[int | None, option("Train adapters of this rank in place of the model.", "N", min=1)] = None
    lora_targets: Annotated[
        str, option("Modules that get adapters, separated by commas.", "NAMES", show_default=True)
    ] = "all-linear"
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the GPUs of this host first, for this and all later plans and runs; then take one step as "
            "planned, with random weights and little of attention. (default false)",
        ),
    ] = False
    json_: Annotated[
        bool, typer.Option("--json", help="Print JSON and nothing else; a list for several lengths. (default false)")
    ] = False
    yaml_: Annotated[
        bool,
        typer.Option(
            "--yaml",
            help="Print a run's YAML for `longspan train` and nothing else; its data are Python's own source files, "
            "to be replaced by yours. (default false)",
        ),
    ] = False

    @property
    def adapter(self) -> Any:
        """The adapters that are trained, as a run's settings; None where the model itself is.

        Raises:
            ConfigError: modules for adapters of no rank.
        """
        from longspan.config import AdapterConfig

        if self.lora_rank is None:
            if self.lora_targets != "all-linear":
                raise ConfigError("--lora-targets names modules for adapters of a --lora-rank: give that too.")
            return None
        return AdapterConfig(kind="lora", rank=self.lora_rank, target_modules=tuple(self.lora_targets.split(",")))

    @property
    def host_bytes(self) -> int:
        """Memory of a node that may be used."""
        return 0 if self.host_memory is None else amount("--host-memory", self.host_memory)


@with_flags(Flags)
def plan(**flags: Any) -> None:
    """Say what fits and how fast it is: the longest rows, or the fastest way to train on rows of a length.

    Without --calibrate nothing is run and no GPU is needed. Exit code 2: it does not fit, or a flag cannot be used, and
    why.
    """
    given = Flags(**flags)
    lengths = _lengths(given)
    if given.calibrate:
        calibrate(given.gpus, sys.stderr)
    plans = run(given, lengths)
    steps = []
    if given.calibrate:
        steps = [fitted(made, given.model, given.adapter, given.gpus, given.host_bytes) for made in plans]
    if given.yaml_:
        from longspan.cli.plan_yaml import run_yaml
        from longspan.plan.library import parse_gpus

        count, machine = parse_gpus(given.gpus)
        print(run_yaml(plans[0], given.model, given.adapter, count if machine.on_gpu else None), end="")
    elif given.json_:
        told = [made.to_json() for made in plans]
        for made, step in zip(told, steps, strict=False):
            made["measured"] = step
        print(json.dumps(told[0] if len(told) == 1 else told))
    else:
        _show(plans)
        for made, step in zip(plans, steps, strict=False):
            gib, expected = step["peak_gib"], step["predicted_gib"]
            print(f"measured at {made.seq_len:,} tokens: {gib} GiB of tensors, predicted {expected}")


def run(flags: Flags, lengths: list[int | None]) -> list[Any]:
    """Return the plans that the flags ask for.

    Raises:
        LongspanError: a flag that cannot be used, a model that is not understood, or a length that does not fit.
    """
    # transformers loads here, so that --help is quick
    from longspan.integrations.planning import cluster_for, shape_to_plan, tasks_for
    from longspan.plan.decide import make_plan
    from longspan.plan.library import parse_gpus

    count, machine = parse_gpus(flags.gpus)
    gpu_bytes = machine.memory_bytes if flags.gpu_memory is None else amount("--gpu-memory", flags.gpu_memory)
    cluster = cluster_for(machine, count, flags.gpus_per_node, gpu_bytes, flags.host_bytes)
    shape = shape_to_plan(flags.model, flags.adapter)
    tasks = tasks_for(shape, cluster, flags.engine, flags.optimizer, count if flags.calibrate else flags.sp)
    return [make_plan(tasks, tokens) for tokens in lengths]


def _lengths(flags: Flags) -> list[int | None]:
    if flags.calibrate and flags.gpu_memory is not None:
        raise ConfigError(
            "--calibrate measures the GPUs of this host, with the memory they have: leave --gpu-memory out."
        )
    if flags.calibrate and flags.sp is not None:
        raise ConfigError("--calibrate takes a step with all GPUs on a row: leave --sp out, or plan without it.")
    if flags.yaml_ and flags.json_:
        raise ConfigError("--yaml and --json both want all of stdout: take one.")
    if flags.seq_len is None:
        return [None]
    if flags.max_seq:
        raise ConfigError(f"--max-seq looks for the longest rows, --seq-len {flags.seq_len} names some: take one.")
    lengths: list[int | None] = [size("--seq-len", text) for text in flags.seq_len.split(",")]
    if flags.yaml_ and len(lengths) > 1:
        raise ConfigError(f"--yaml describes one run, --seq-len {flags.seq_len} names {len(lengths)}: take one.")
    return lengths


def _show(plans: list[Any]) -> None:
    from rich.console import Console

    from longspan.cli.plan_tables import causes_table, lengths_table

    console = Console(width=None if sys.stdout.isatty() else 140)
    if len(plans) > 1:
        print(f"longest row that fits: {plans[0].max_seq_len:,} tokens")
        console.print(lengths_table(plans))
        return
    made = plans[0]
    print("\n".join(made.headlines()))
    print(f"{made.tokens_per_s:,.0f} tokens/s, MFU {100 * (made.mfu or 0):.0f} %")
    console.print(causes_table(made))

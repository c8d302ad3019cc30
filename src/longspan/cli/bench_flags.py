"""The command lines of `longspan bench`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from longspan.cli.flags import LoraRank, option
from longspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What every benchmark takes."""

    sp: Annotated[
        int | None,
        option("Processes, all of which share a sequence. (default: one per GPU; a launcher's where it started)", "N"),
    ] = None
    device: Annotated[str, option("cpu, cuda or auto: cuda if there is a GPU per process.", "NAME")] = "auto"
    out: Annotated[
        str, option("Folder of result files, named by what was measured, the GPUs and the date.", "FOLDER")
    ] = "benchmarks/results"
    commit: Annotated[
        str | None, option("Commit to write down. (default: that of the checkout in the current folder)", "ID")
    ] = None
    limit_s: Annotated[
        float | None,
        option("Seconds after which to stop with what there is; a row that would take longer is not begun.", "S"),
    ] = None
    json_: Annotated[bool, typer.Option("--json", help="Print the content of the result file. (default false)")] = False


@dataclass(frozen=True, kw_only=True)
class WorkFlags(Flags):
    """What benchmarks of a whole step take."""

    model: Annotated[str, option("A preset, folder or hub id; weights are random.", "NAME")] = "llama-8b"
    layers: Annotated[int | None, option("Keep the model's first layers. (default: all)", "N")] = None
    seq_len: Annotated[str, option("Tokens per row, separated by commas: 32K,128K.", "SIZES")] = "32K,128K"
    memory: Annotated[
        list[str] | None,
        option(
            "What layers keep, may be repeated: auto for the plan's choice, or TILE/KEEP/COMPILE and perhaps /OPTIONS: "
            "16384/x,none*31/inductor/gpu=60GiB,host=100GiB,rebuilt=O; @32768 after it restricts it to lengths. "
            "(default: auto)",
            "TEXT",
        ),
    ] = None
    ulysses: Annotated[int | None, option("Processes that exchange heads. (default: chosen)", "N")] = None
    ring: Annotated[int | None, option("Processes that pass keys and values on. (default: chosen)", "N")] = None
    kernel: Annotated[str, option("Attention kernel: auto or a name of `longspan doctor`.", "NAME")] = "auto"
    engine: Annotated[
        str,
        option("fsdp2 | zero-1 to zero-3 | single | auto: single for one process that steps in backward.", "NAME"),
    ] = "auto"
    optimizer: Annotated[str, option("adamw | adamw-host | adamw8bit | adamw-bf16-sr.", "NAME")] = "adamw"
    host_memory: Annotated[
        str | None, option("Host memory that plans may use: 256GiB. (default: what is free)", "SIZE")
    ] = None
    seed: Annotated[int, option("Of weights and tokens.", "N")] = 0
    lora_rank: LoraRank = None


@dataclass(frozen=True, kw_only=True)
class StepFlags(WorkFlags):
    """The command line of `bench step`."""

    steps: Annotated[int, option("Steps to measure, after one that warms up.", "N", min=1)] = 3
    profile: Annotated[
        bool, typer.Option("--profile", help="Tell where the time of one more step goes. (default false)")
    ] = False
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Then measure others on the same work, where installed. (default false)"),
    ] = False
    liger: Annotated[
        bool, typer.Option("--liger", help="Give peers that can use them Liger's kernels. (default false)")
    ] = False


@dataclass(frozen=True, kw_only=True)
class FitFlags(WorkFlags):
    """The command line of `bench fit`."""

    seq_len: Annotated[str, option("Tokens per row, separated by commas: 1M,3M.", "SIZES")] = "1M"
    search: Annotated[
        bool, typer.Option("--search", help="Look for the longest row from --seq-len on. (default false)")
    ] = False


@dataclass(frozen=True, kw_only=True)
class HeadFlags(Flags):
    """The attention that is exchanged for."""

    heads: Annotated[str, option("Query heads, KV heads and head size.", "H:K:D")] = "32:8:128"

    @property
    def chosen_heads(self) -> Any:
        """The heads.

        Raises:
            ConfigError: not three numbers.
        """
        from longspan.bench.exchange import Heads

        parts = self.heads.split(":")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
            raise ConfigError(f"--heads is three numbers such as 32:8:128, got {self.heads!r}.")
        return Heads(*(int(part) for part in parts))


@dataclass(frozen=True, kw_only=True)
class ExchangeFlags(HeadFlags):
    """The command line of `bench exchange`."""

    payload_mib: Annotated[int, option("MiB that each process exchanges.", "N", min=1)] = 512
    times: Annotated[int, option("How often.", "N", min=1)] = 100


@dataclass(frozen=True, kw_only=True)
class AttentionFlags(HeadFlags):
    """The command line of `bench attention`."""

    seq_len: Annotated[str, option("Tokens of the row.", "SIZE")] = "128K"
    kernel: Annotated[str, option("Attention kernel: auto or a name of `longspan doctor`.", "NAME")] = "auto"
    times: Annotated[int, option("How often.", "N", min=1)] = 7


@dataclass(frozen=True, kw_only=True)
class AllFlags(StepFlags):
    """The command line of `bench all`."""

    fit_seq_len: Annotated[
        str | None, option("Tokens of the row to prove. (default: 3M; 1200K for one process)", "SIZE")
    ] = None
    attention_seq_len: Annotated[str, option("Tokens of the row that attention is measured on.", "SIZE")] = "128K"
    payload_mib: Annotated[int, option("MiB that each process exchanges.", "N", min=1)] = 512
    heads: Annotated[str, option("Query heads, KV heads and head size of exchange and attention.", "H:K:D")] = (
        "32:8:128"
    )


@dataclass(frozen=True, kw_only=True)
class TableFlags:
    """The command line of `bench table`."""

    page: Annotated[str, option("Page to write to.", "FILE")] = "docs/benchmarks.md"
    results: Annotated[str, option("Folder of result files.", "FOLDER")] = "benchmarks/results"

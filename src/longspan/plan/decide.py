"""From a model, a cluster and a length to a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from longspan.errors import ConfigError
from longspan.keep import Keep
from longspan.plan.degrees import Degrees
from longspan.plan.machine import GIB, Cluster
from longspan.plan.memory import MOVING_BYTES, Ledger
from longspan.plan.plan import Plan
from longspan.plan.setup import IN_BACKWARD, OPTIMIZERS, RECURRENCE_BYTES, Optimizer, Setup
from longspan.plan.shapes import ModelShape
from longspan.plan.solve import Choice, fits, solve
from longspan.plan.tiles import (
    KEY_BLOCK_TOKENS,
    SMALLEST_COMPILED_TOKENS,
    SMALLEST_OVERLAPPED_TOKENS,
    largest_tile,
    tile_tokens,
)

LENGTH_STEP = 1024
"""The longest length is a multiple of this."""

SLOWER = 1.05
"""What comes first, of optimizers and of numbers of GPUs on a row, is taken as long as it is not slower than another by
more than this factor."""


@dataclass(frozen=True)
class Task:
    """What a plan is asked for, all but the length.

    Args:
        optimizers: those that may be chosen, the preferred first.
        itemsize: bytes of an activation.
        compiles: whether full tiles may be compiled.
        rebuilds: whether layers may run again outside their turn, which every rank must do alike.
        recurrence_bytes: of a recurrence in backward, per number of its operands.
        settled: whether the optimizer steps as it says; else one process alone may choose to step inside backward.
    """

    shape: ModelShape
    cluster: Cluster
    degrees: Degrees
    engine: str = "fsdp2"
    optimizers: tuple[Optimizer, ...] = (OPTIMIZERS["adamw"], OPTIMIZERS["adamw-host"])
    kernel: str = "auto"
    rows: int = 1
    itemsize: int = 2
    compiles: bool = True
    rebuilds: bool = True
    settled: bool = False
    streams_norm: bool = False
    key_block_tokens: int | None = KEY_BLOCK_TOKENS
    recurrence_bytes: int = RECURRENCE_BYTES

    def setups(self, tokens: int, optimizer: Optimizer) -> Iterator[Setup]:
        """Yield the setups for a length, by size of tile: the largest that is sensible, and smaller ones.

        One process whose optimizer spares memory steps inside backward, without an engine.
        """
        alone = optimizer.name in IN_BACKWARD and self.cluster.gpus == 1 and not self.settled
        base = Setup(
            self.shape,
            self.cluster,
            "single" if alone else self.engine,
            replace(optimizer, gradient_bytes=0) if alone else optimizer,
            self.degrees.ulysses,
            self.degrees.ring,
            tokens,
            rows=self.rows,
            kernel=self.kernel,
            itemsize=self.itemsize,
            streams_norm=self.streams_norm,
            key_block_tokens=self.key_block_tokens,
            recurrence_bytes=self.recurrence_bytes,
        )
        seen = set()
        most = max(SMALLEST_COMPILED_TOKENS, largest_tile(self.shape) // self.rows)
        if self.degrees.ulysses > 1:  # two tiles at least, of a size that is worth it: one travels while one computes
            most = min(most, max(SMALLEST_OVERLAPPED_TOKENS // self.rows, base.shard_tokens // 2))
            most = max(most, SMALLEST_COMPILED_TOKENS)
        while most >= SMALLEST_COMPILED_TOKENS:
            tile = tile_tokens(base.shard_tokens, most)
            if tile not in seen:
                seen.add(tile)
                compiled = self.compiles and tile >= SMALLEST_COMPILED_TOKENS
                yield replace(base, tile_tokens=tile, compiled=compiled)
            most //= 2

    def choose(self, tokens: int, below_s: float = math.inf) -> Choice | None:
        """Return the fastest way to run rows of so many tokens, or None if they do not fit.

        Args:
            below_s: seconds of a step that are to be beaten; what is slower need not be found.
        """
        found = []
        for optimizer in self.optimizers:
            best: Choice | None = None
            for setup in self.setups(tokens, optimizer):
                choice = solve(setup, self.rebuilds, below_s if best is None else best.step_s)
                if choice is not None and (best is None or choice.step_s < best.step_s):
                    best = choice
            if best is not None:
                found.append(best)
        best_s = min((choice.step_s for choice in found), default=0.0)
        return next((choice for choice in found if choice.step_s <= SLOWER * best_s), None)

    def fits(self, tokens: int) -> bool:
        """Tell whether rows of so many tokens fit in some way."""
        return any(
            fits(setup, self.rebuilds) for optimizer in self.optimizers for setup in self.setups(tokens, optimizer)
        )

    @cached_property
    def longest(self) -> int:
        """The longest row that fits, in whole thousands (of 1024); 0 if none does."""
        high = 1
        while high < 1 << 24 and self.fits(high * LENGTH_STEP):
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.fits(middle * LENGTH_STEP):
                low = middle
            else:
                high = middle
        return low * LENGTH_STEP

    def too_long(self, tokens: int) -> ConfigError:
        """Return the error for a length that does not fit: the numbers, and the way out."""
        where = (
            f"{self.shape.name}: rows of {tokens:,} tokens do not fit {self.cluster.gpus} x {self.cluster.machine.name}"
        )
        needs = "; ".join(self._needs(tokens, optimizer) for optimizer in self.optimizers)
        longest = self.longest
        ways = [f"rows of at most {longest:,}"] if longest else []
        for optimizer in () if self.engine.startswith("zero-") else OPTIMIZERS.values():  # DeepSpeed has its own
            if optimizer not in self.optimizers and replace(self, optimizers=(optimizer,)).fits(tokens):
                ways.append(f"optimizer {optimizer.name}")
        return ConfigError(f"{where}: {needs}. Use {', '.join(ways)}{', or ' if ways else ''}more GPUs.")

    def _needs(self, tokens: int, optimizer: Optimizer) -> str:
        """Say what an optimizer needs at least, and of which there is too little."""
        ledger = Ledger(list(self.setups(tokens, optimizer))[-1], MOVING_BYTES)
        if ledger.host and ledger.host_capacity < 0:
            share = self.cluster.host_bytes / self.cluster.local_ranks
            needed = sum(ledger.host.values()) / GIB
            return f"{optimizer.name} takes {needed:.1f} GiB of each rank's {share / GIB:.1f} GiB of host memory"
        fullest = max(ledger.moments, key=lambda moment: moment.total)
        causes = sorted(fullest.causes.items(), key=lambda item: -item[1])[:3]
        held = ", ".join(f"{cause} {size / GIB:.1f}" for cause, size in causes)
        return (
            f"with {optimizer.name} {fullest.total / GIB:.1f} GiB of a GPU are needed besides what layers keep "
            f"({held}), of {ledger.capacity / GIB:.1f} GiB that can be used"
        )


def make_plan(tasks: Sequence[Task], tokens: int | None = None) -> Plan:
    """Plan a length, or the longest that fits.

    Args:
        tasks: ways to divide the same cluster, those with the most GPUs on a row first, as longer rows fit them.

    Raises:
        ConfigError: it does not fit, with the numbers.
    """
    if tokens is not None and tokens < 1:
        raise ConfigError(f"A row has at least one token, got {tokens}.")
    longest = tasks[0].longest
    length = tokens or longest
    found: tuple[Task, Choice] | None = None
    for task in tasks if tokens else tasks[:1]:
        replicas = task.cluster.gpus // task.degrees.size
        fastest = 0.0 if found is None else SLOWER * found[1].tokens_per_s
        below_s = task.rows * length * replicas / fastest if fastest else math.inf
        choice = task.choose(length, below_s) if length else None
        if choice is not None and choice.tokens_per_s > fastest:
            found = task, choice
    if found is None:
        raise tasks[0].too_long(length or LENGTH_STEP)
    return plan_of(*found, longest)


def plan_of(task: Task, choice: Choice, longest: int | None) -> Plan:
    """Return the plan that a choice makes."""
    setup, degrees = choice.setup, task.degrees
    machine = setup.cluster.machine
    model_flops = setup.shape.flops(setup.rows, setup.tokens) * setup.data
    kernel = machine.rate("auto").name if task.kernel == "auto" else task.kernel
    return Plan(
        degrees.size,
        degrees.ulysses,
        degrees.ring,
        kernel,
        "tiled cross-entropy",
        (degrees.reason, *_reasons(task, choice, kernel)),
        seq_len=setup.tokens,
        max_seq_len=longest,
        level=level(choice),
        engine=setup.engine,
        optimizer=setup.optimizer.name,
        memory=choice.memory,
        gpu_bytes={cause: round(size) for cause, size in choice.gpu_bytes.items() if size},
        host_bytes={cause: round(size) for cause, size in choice.host_bytes.items() if size},
        seconds={cause: s for cause, s in choice.seconds.items() if s},
        tokens_per_s=choice.tokens_per_s,
        data_parallel_size=setup.data,
        mfu=model_flops / (choice.step_s * machine.peak_tflops * 1e12 * setup.cluster.gpus),
    )


def level(choice: Choice) -> str:
    """Name how much a choice computes again."""
    again = [run for run in choice.runs if run.first is Keep.X or (run.rest is Keep.NONE and len(run.keeps) > 1)]
    kinds = ["graph"] if choice.graphs else []
    kinds += ["1F"] if len(again) < len(choice.runs) else []
    return "+".join(kinds + (["2F"] if again else []))


def _reasons(task: Task, choice: Choice, kernel: str) -> Iterator[str]:
    setup, machine = choice.setup, choice.setup.cluster.machine
    rate = machine.rate(kernel)
    yield f"attention with {kernel} at {rate.forward_tflops:g} and {rate.backward_tflops:g} TFLOP/s"
    named = level(choice)
    if named == "graph":
        yield "all activations fit, so nothing is computed again"
    elif "2F" not in named:
        yield "attention's output fits for every layer, so its forward runs once"
    else:
        again = sum(len(run.keeps) for run in choice.runs if run.first is Keep.X or run.rest is Keep.NONE)
        yield f"attention's output of {again} layers fits only a few layers at a time, so their forward runs twice"
    away = choice.host_bytes.get("kept by layers", 0)
    if away:
        yield f"{away / GIB:.1f} GiB of what layers keep lie on the host"
    if setup.optimizer.name != task.optimizers[0].name:
        yield f"{setup.optimizer.name}, since {task.optimizers[0].name} leaves too little of the GPU"
    if setup.optimizer.in_backward:
        yield "each parameter is stepped inside backward, as soon as its gradient is there"
    if task.degrees.size < setup.cluster.gpus:
        yield (
            f"{setup.data} data-parallel replicas of {task.degrees.size} GPU{'s' * (task.degrees.size > 1)}, "
            f"{setup.data * setup.rows * setup.tokens:,} tokens a step"
        )

"""What the plan says about a benchmark, before it runs: the one place where they meet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from longspan.bench.clock import rounded_gib
from longspan.bench.settings import Work
from longspan.errors import ConfigError
from longspan.integrations.planning import cluster_for, task_for
from longspan.integrations.shapes import model_shape
from longspan.keep import Keep, Memory
from longspan.plan.decide import Task
from longspan.plan.degrees import choose_degrees
from longspan.plan.library import find_machine, machine_of
from longspan.plan.memory import MOVING_BYTES, Ledger
from longspan.plan.runs import Costs, Run
from longspan.plan.setup import Setup
from longspan.plan.solve import Room, choice_of

_UNCOUNTED = ("reserve", "exchanges")
"""Bytes that are not torch's allocator's, whose peak is measured."""


@dataclass(frozen=True)
class Host:
    """What a benchmark runs on.

    Args:
        gpu: as its driver names it; None without one.
        gpu_bytes: its memory.
    """

    gpu: str | None
    gpus: int
    gpu_bytes: int
    host_bytes: int


def planned(config: Any, work: Work, host: Host, tokens: int) -> Memory:
    """Return the memory setting that the plan chooses for a length.

    Raises:
        ConfigError: no figures for this GPU, or nothing fits.
    """
    task = _task(config, work, host)
    choice = task.choose(tokens)
    if choice is None:
        raise task.too_long(tokens)
    return choice.memory


def predicted(config: Any, work: Work, host: Host, tokens: int, memory: Memory) -> dict[str, float]:
    """Return the seconds and GiB that are expected of a setting; nothing where the plan cannot tell.

    It cannot for a GPU that it has no figures for, or for decisions in an order that it would not take.
    """
    runs = _runs(memory, config.get_text_config().num_hidden_layers)
    try:
        task = _task(config, work, host)
    except ConfigError:
        return {}
    if runs is None:
        return {}
    setup = _setup(task, memory, tokens)
    costs = Costs(setup)
    room = Room(math.inf, (math.inf,) * costs.count, memory.budget)
    moving = 0 if memory.budget.gpu_bytes is None else memory.budget.moving_bytes or MOVING_BYTES
    choice = choice_of(costs, Ledger(setup, moving), room, *runs)
    on_gpu = sum(size for cause, size in choice.gpu_bytes.items() if cause not in _UNCOUNTED)
    return {
        "predicted_s": round(choice.step_s, 3),
        "predicted_gib": rounded_gib(on_gpu),
        "predicted_host_gib": rounded_gib(host.gpus * sum(choice.host_bytes.values())),
    }


def _task(config: Any, work: Work, host: Host) -> Task:
    machine = find_machine("cpu") if host.gpu is None else machine_of(host.gpu)
    if machine is None:
        raise ConfigError(f"There are no figures for {host.gpu}: `longspan plan --calibrate` measures them.")
    cluster = cluster_for(machine, host.gpus, host.gpus, host.gpu_bytes, host.host_bytes)
    task = task_for(model_shape(config, adapter=work.adapter), cluster, work.chosen_engine, work.optimizer)
    if (work.ulysses, work.ring) != (None, None):
        layer = task.shape.layers[0]
        degrees = choose_degrees(layer.heads, layer.kv_heads, work.sp, ulysses=work.ulysses, ring=work.ring)
        task = replace(task, degrees=degrees)
    return replace(task, kernel=work.kernel)


def _setup(task: Task, memory: Memory, tokens: int) -> Setup:
    first = next(iter(task.setups(tokens, task.optimizers[0])))
    return replace(first, tile_tokens=memory.tile_tokens, compiled=memory.compile is not None)


def _runs(memory: Memory, count: int) -> tuple[tuple[Run, ...], int] | None:
    """Return runs of layers that share what the first kept, and the graphs on top of them."""
    keeps = (memory.keep,) * count if isinstance(memory.keep, Keep) else memory.keep
    rebuilt = (memory.rebuilt,) * count if isinstance(memory.rebuilt, Keep) else memory.rebuilt
    graphs = next((i for i, keep in enumerate(reversed(keeps)) if keep is not Keep.GRAPH), count)
    below = keeps[: count - graphs]
    if Keep.GRAPH in below:
        return None
    return tuple(_stretches(below, rebuilt)), graphs


def _stretches(keeps: tuple[Keep, ...], rebuilt: tuple[Keep, ...]) -> Iterator[Run]:
    start = 0
    for stop in range(1, len(keeps) + 1):
        rest = keeps[start + 1] if stop > start + 1 else None
        goes_on = stop < len(keeps) and keeps[stop] in (Keep.NONE, Keep.OUT) and rest in (None, keeps[stop])
        if not goes_on:
            yield Run(start, stop, keeps[start], rest or Keep.NONE, rebuilt[stop - 1])
            start = stop

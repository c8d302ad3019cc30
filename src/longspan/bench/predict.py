"""What the plan says about a benchmark, before it runs: the one place where they meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from longspan.bench.clock import rounded_gib
from longspan.bench.settings import Work
from longspan.errors import ConfigError
from longspan.integrations.planning import cluster_for, task_for
from longspan.integrations.shapes import model_shape
from longspan.keep import Memory
from longspan.plan.decide import Task
from longspan.plan.degrees import choose_degrees
from longspan.plan.given import given
from longspan.plan.library import find_machine, machine_of

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
    try:
        task = _task(config, work, host)
    except ConfigError:
        return {}
    choice = given(next(iter(task.setups(tokens, task.optimizers[0]))), memory)
    if choice is None:
        return {}
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

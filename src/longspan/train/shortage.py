"""What to change when a step has run out of memory, as the planner sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from longspan.config import RunConfig
from longspan.errors import ConfigError
from longspan.integrations.transformers.automatic import Automatic
from longspan.keep import Keep, Memory
from longspan.optim import check_kind
from longspan.plan.decide import Task
from longspan.plan.degrees import choose_degrees
from longspan.plan.given import given
from longspan.plan.machine import GIB
from longspan.plan.plan import Plan
from longspan.plan.runs import Costs
from longspan.plan.setup import find_optimizer
from longspan.plan.solve import forced
from longspan.train.trainee import Trainee

_LEFT = 0.9
"""What was planned did not fit, so ways out are planned for this share of a device."""


@dataclass(frozen=True)
class Way:
    """A change of settings with which a step is predicted to fit.

    Args:
        token_s: seconds of the whole machine per token of a row.
    """

    text: str
    token_s: float


def advice(config: RunConfig, trainee: Trainee) -> str:
    """Say what a step was expected to need, by cause, and the cheapest change with which it is predicted to fit."""
    automatic = trainee.handle.automatic or Automatic.alone(trainee.handle, trainee.device)
    automatic.expect(config.optimizer.kind, config.optimizer.step_in_backward)
    task = replace(automatic.task(trainee.model), rows=config.micro_batch_size)
    ways = sorted(_ways(config, task), key=lambda way: way.token_s)
    said = [f"Cheapest change: {ways[0].text}."] if ways else []
    if len(ways) > 1:
        said.append(f"Or: {'; '.join(way.text for way in ways[1:])}.")
    said.append(f"Or fewer tokens: sequence_length: {_fewer(config, task):,}.")
    return " ".join([_expected(config, task, trainee.handle.plan), *said])


def _expected(config: RunConfig, task: Task, plan: Plan) -> str:
    device = "GPU" if task.cluster.machine.on_gpu else "process"
    sizes = plan.gpu_bytes or _planned(config, task)
    if not sizes:
        return f"Graphs below layers that keep less are not planned; a {device} has {_size(task.cluster.gpu_bytes)}."
    parts = ", ".join(f"{cause} {_size(n)}" for cause, n in sorted(sizes.items(), key=lambda item: -item[1]) if n)
    total, held = _size(sum(sizes.values())), _size(task.cluster.gpu_bytes)
    return f"The plan expected {total} of the {held} of a {device}: {parts}."


def _planned(config: RunConfig, task: Task) -> Mapping[str, float]:
    """Return the bytes, by cause, of layers that keep what the settings say; nothing where the plan cannot tell."""
    memory = config.memory.decided
    choice = given(
        next(task.setups(config.sequence_length, task.optimizers[0])), Memory() if memory == "auto" else memory
    )
    return {} if choice is None else choice.gpu_bytes


def _ways(config: RunConfig, task: Task) -> Iterator[Way]:
    """Yield changes with which rows of this length are predicted to fit."""
    less = replace(task, cluster=replace(task.cluster, gpu_bytes=int(_LEFT * task.cluster.gpu_bytes)))
    tokens = config.sequence_length
    if config.memory.keep == "auto":
        yield from _kept(config, less)
    elif (choice := less.choose(tokens)) is not None:
        yield Way("memory.keep: auto, and nothing else in memory", _token_s(less, choice.step_s, tokens))
    for kind in ("adamw-host", "adamw8bit"):
        if _serves(config, kind):
            old = task.optimizers[0]
            new = replace(find_optimizer(kind), weight_bytes=old.weight_bytes, gradient_bytes=old.gradient_bytes)
            other = replace(less, optimizers=(new,))
            if (choice := other.choose(tokens)) is not None:
                yield Way(f"optimizer.kind: {kind}", _token_s(other, choice.step_s, tokens))
    yield from _wider(less, tokens)


def _kept(config: RunConfig, task: Task) -> Iterator[Way]:
    """Yield ways for all layers to keep the same, and little; the fastest of each."""
    for keep in (Keep.X_O_KV, Keep.X_O, Keep.X):
        best: Way | None = None
        for setup in task.setups(config.sequence_length, task.optimizers[0]):
            choice = forced(Costs(replace(setup, compiled=False)), keep)
            if sum(choice.gpu_bytes.values()) > _LEFT * sum(_planned(config, task).values()):
                continue
            token_s = _token_s(task, choice.step_s, config.sequence_length)
            if best is None or token_s < best.token_s:
                best = Way(f"memory.keep: {keep} with memory.tile_tokens: {setup.tile_tokens}", token_s)
        if best is not None:
            yield best


def _wider(task: Task, tokens: int) -> Iterator[Way]:
    """Yield larger degrees, where there are replicas to make them of."""
    layer = next((layer for layer in task.shape.layers if not layer.recurrent), task.shape.layers[0])
    size = task.degrees.size
    for more in range(2 * size, task.cluster.gpus + 1, size):
        if task.cluster.gpus % more:
            continue
        degrees = choose_degrees(layer.heads, layer.kv_heads, more, task.cluster.local_ranks)
        wider = replace(task, degrees=degrees)
        if (choice := wider.choose(tokens)) is not None:
            yield Way(f"sequence_parallel_size: {more}", _token_s(wider, choice.step_s, tokens))


def _serves(config: RunConfig, kind: str) -> bool:
    """Whether a run may take another kind of optimizer; one that goes on from a checkpoint may not."""
    if config.resume or config.optimizer.kind in (kind, "adamw-host") or config.engine.startswith("zero-"):
        return False
    try:
        check_kind(kind)
    except ConfigError:
        return False
    return True


def _fewer(config: RunConfig, task: Task) -> int:
    """Return a length that fits with room to spare."""
    less = replace(task, cluster=replace(task.cluster, gpu_bytes=int(_LEFT * task.cluster.gpu_bytes)))
    longest = less.longest if config.sequence_length > 1024 else 0
    return min(longest or config.sequence_length, max(1, config.sequence_length * 3 // 4))


def _token_s(task: Task, step_s: float, tokens: int) -> float:
    replicas = task.cluster.gpus // task.degrees.size
    return step_s / (tokens * task.rows * replicas)


def _size(count_bytes: float) -> str:
    return f"{count_bytes / GIB:.2f} GiB" if count_bytes >= GIB / 100 else f"{count_bytes / 2**20:.2f} MiB"

"""`longspan.plan`: what a model needs and how fast it trains, before it is built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import logging

from longspan.config import AdapterConfig, ModelConfig
from longspan.config.section import parse_size
from longspan.errors import ConfigError, ModelError
from longspan.integrations.models import load_model_config
from longspan.integrations.random_weights import few_layers, narrowed, untrained_model
from longspan.integrations.shapes import model_shape
from longspan.integrations.transformers.prepare import refuse_unless_exact
from longspan.plan.decide import Task, make_plan
from longspan.plan.degrees import choose_degrees
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB, Cluster, Machine
from longspan.plan.plan import Plan
from longspan.plan.setup import ENGINES, OPTIMIZERS, Optimizer, find_optimizer
from longspan.plan.shapes import ModelShape
from longspan.recurrent.fla import FlaRule
from longspan.recurrent.rule import ChunkedRule

NODE_GPUS = 8


def plan(
    model_or_config: Any,
    seq_len: int | str | None = None,
    world_size: int = 8,
    gpu_memory_gib: float = 139,
    host_memory_gib: float = 560,
    engine: str = "fsdp2",
    *,
    gpu: str = "h200",
    optimizer: str = "auto",
    sequence_parallel_size: int | None = None,
) -> Plan:
    """Decide how to train a model on rows of a length, and predict its memory and its speed.

    Nodes have 8 GPUs, or as many as there are if fewer. Neither weights nor GPUs are needed; a small copy of the model
    runs on the CPU, to refuse what `prepare` would.

    Args:
        model_or_config: a preset, folder or hub id, a transformers configuration, or a model.
        seq_len: tokens per row, also as 128K (x 1024) or 1M; None for the longest that fits.
        world_size: GPUs.
        gpu_memory_gib: total memory of a GPU.
        host_memory_gib: memory of a node.
        engine: who holds parameters: fsdp2, ddp, single, or zero-0 to zero-3 (DeepSpeed, bfloat16 on float32 masters).
        gpu: kind of GPU, whose rates are used: a name in `longspan.plan.library.machines()`.
        optimizer: adamw (fp32), adamw-host (the same, in host memory), adamw8bit, adamw-bf16-sr; auto takes adamw, or
            adamw-host where it does not fit. The zero engines serve adamw alone.
        sequence_parallel_size: GPUs that share a row, the others being data-parallel replicas; None for what trains
            most tokens a second, and for all of them if the longest rows are asked for.

    Raises:
        ConfigError: a setting that is not known, or a length that does not fit, with the numbers.
        ModelError: no causal language model of text, or one that `prepare` refuses.
    """
    _check_numbers(world_size, sequence_parallel_size, gpu_memory_gib, host_memory_gib)
    for name, value in (("engine", engine), ("gpu", gpu), ("optimizer", optimizer)):
        if not isinstance(value, str):
            raise ConfigError(f"{name} is a name, got {value!r}.")
    sizes = (round(gpu_memory_gib * GIB), round(host_memory_gib * GIB))
    cluster = cluster_for(find_machine(gpu), world_size, NODE_GPUS, *sizes)
    tokens = None if seq_len is None else _tokens(seq_len)
    shape = shape_to_plan(model_or_config)
    return make_plan(tasks_for(shape, cluster, engine, optimizer, sequence_parallel_size), tokens)


def shape_to_plan(model: str | PretrainedConfig | nn.Module, adapter: AdapterConfig | None = None) -> ModelShape:
    """Return the shape of a model that `prepare` takes; see `model_shape`.

    What shows when a model runs is looked for on a small one of its configuration, with few and narrow layers and
    random weights; where that cannot be made or run, `prepare` has the last word.

    Raises:
        ConfigError: there is no such model.
        ModelError: it is no causal language model, or `prepare` refuses it.

    Cost: builds the small model and runs it on 5 tokens: 0.05 to 0.5 s for most families, up to some seconds for those
        whose widths do not shrink.
    """
    name = model if isinstance(model, str) else None
    if name is not None:
        model = load_model_config(ModelConfig(name=name, init="random"))
    config = getattr(model, "config", None) if isinstance(model, nn.Module) else model
    if not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"longspan plans transformers models, got {type(model).__name__}: give a preset, a folder or hub id, a "
            "transformers configuration or a model."
        )
    shape = model_shape(model, adapter=adapter, name=name)
    with torch.random.fork_rng(devices=[]), _quiet():
        try:
            small = untrained_model(narrowed(few_layers(config))[0], 0, torch.float32, torch.device("cpu"))
        except ConfigError:
            return shape
        try:
            refuse_unless_exact(small)
        except ModelError as error:
            if error.__cause__ is None:  # else it only cannot run, which may be for want of width
                raise
    return shape


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from telling how fast a model would run that trains nothing."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _tokens(seq_len: Any) -> int:
    try:
        return parse_size(seq_len)
    except ValueError as error:
        raise ConfigError(f"seq_len {seq_len!r} is {error}.") from None


def _check_numbers(world_size: Any, size: Any, gpu_memory_gib: Any, host_memory_gib: Any) -> None:
    for name, gpus in (("world_size", world_size), ("sequence_parallel_size", 1 if size is None else size)):
        if not isinstance(gpus, int) or isinstance(gpus, bool):
            raise ConfigError(f"{name} is a number of GPUs, such as 8, got {gpus!r}.")
    for name, gib in (("gpu_memory_gib", gpu_memory_gib), ("host_memory_gib", host_memory_gib)):
        if not isinstance(gib, int | float) or isinstance(gib, bool) or not math.isfinite(gib):
            raise ConfigError(f"{name} is a number of GiB, such as 80, got {gib!r}.")


def cluster_for(machine: Machine, gpus: int, node_gpus: int, gpu_bytes: int, host_bytes: int) -> Cluster:
    """Return a cluster of equal nodes.

    Raises:
        ConfigError: numbers that make none.
    """
    if gpus < 1 or node_gpus < 1 or gpu_bytes <= 0 or host_bytes < 0:
        raise ConfigError(
            f"A plan needs at least one GPU with memory, got {gpus} GPUs, {node_gpus} per node, {gpu_bytes:,} bytes of "
            f"GPU memory and {host_bytes:,} bytes of host memory."
        )
    if gpus > node_gpus and gpus % node_gpus:
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {node_gpus}: take a multiple of {node_gpus}, or another number per node."
        )
    return Cluster(machine, gpus, min(gpus, node_gpus), gpu_bytes, host_bytes)


def tasks_for(
    shape: ModelShape, cluster: Cluster, engine: str, optimizer: str, sequence_parallel_size: int | None = None
) -> list[Task]:
    """Return the tasks of training a model on a cluster with so many GPUs on a row, or with each number that divides
    the cluster's, the most first. Only there may layers be rebuilt: where they had to be, more GPUs are faster.

    Raises:
        ConfigError, TopologyError: as `task_for`; a number that does not divide the GPUs.
    """
    divisors = [size for size in range(cluster.gpus, 0, -1) if cluster.gpus % size == 0]
    if sequence_parallel_size is not None and sequence_parallel_size not in divisors:
        raise ConfigError(
            f"{sequence_parallel_size} GPUs on a row do not divide {cluster.gpus}: take one of "
            f"{', '.join(map(str, divisors))}."
        )
    sizes = divisors if sequence_parallel_size is None else [sequence_parallel_size]
    widest, *others = (task_for(shape, cluster, engine, optimizer, size) for size in sizes)
    return [widest, *(replace(task, rebuilds=False) for task in others)]


def task_for(
    shape: ModelShape, cluster: Cluster, engine: str, optimizer: str, sequence_parallel_size: int | None = None
) -> Task:
    """Return the task of training a model on a cluster, all of whose GPUs share a row, or so many of them.

    Activations are in bfloat16, on a CPU in float32, and so are models with adapters, the adapters and their optimizer.

    Raises:
        ConfigError: an unknown engine or optimizer.
        TopologyError: no degrees serve the heads.
    """
    if engine not in ENGINES:
        raise ConfigError(f"Unknown engine {engine!r}; use {', '.join(ENGINES)}.")
    itemsize = 2 if cluster.machine.on_gpu else 4
    optimizers: tuple[Optimizer, ...]
    if engine.startswith("zero-"):
        if optimizer not in ("auto", "adamw"):
            raise ConfigError(f"Engine {engine} serves optimizer adamw, not {optimizer!r}: take adamw, or fsdp2.")
        optimizers = (Optimizer.under_zero(int(engine[-1]), itemsize),)
    elif shape.trained < shape.parameters:
        optimizers = (Optimizer.held("adamw" if optimizer == "auto" else optimizer, itemsize, itemsize),)
    elif optimizer == "auto":
        optimizers = (OPTIMIZERS["adamw"], OPTIMIZERS["adamw-host"])
    else:
        optimizers = (find_optimizer(optimizer),)
    size = sequence_parallel_size or cluster.gpus
    heads = {(layer.heads, layer.kv_heads) for layer in shape.layers if not layer.recurrent} or {(size, 1)}
    degrees = min((choose_degrees(h, k, size, cluster.node_gpus) for h, k in heads), key=lambda d: d.ulysses)
    rule = FlaRule if cluster.machine.on_gpu else ChunkedRule
    return Task(
        shape,
        cluster,
        degrees,
        engine,
        optimizers,
        itemsize=itemsize,
        streams_norm=True,
        recurrence_bytes=rule.held_bytes,
    )

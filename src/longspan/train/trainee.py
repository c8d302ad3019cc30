"""Put a model, an engine and an optimizer together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import longspan
from longspan.config import RunConfig
from longspan.engines import Engine, Origin, StepsItself, build_engine
from longspan.engines.origin import from_first
from longspan.integrations.adapters import add_adapter
from longspan.integrations.quantize import quantize_layers
from longspan.mesh import Mesh
from longspan.once import is_first
from longspan.optim import Stepping, build_optimizer, choose_stepping
from longspan.train.meter import Meter
from longspan.train.metrics import model_work
from longspan.train.room import Build, blank_model, check_host, check_memory
from longspan.weights import whole_shape


@dataclass(frozen=True)
class Trainee:
    """A model that is ready to train.

    Args:
        model: the model itself, for saving.
        module: what the engine made of it, for calling.
        handle: what `longspan.prepare` returned.
        meter: measures the steps of this process.
    """

    model: nn.Module
    module: nn.Module
    handle: Any
    engine: Engine
    stepping: Stepping
    meter: Meter
    device: torch.device

    @property
    def mesh(self) -> Mesh:
        """Axes of the run."""
        return self.handle.mesh

    def close(self) -> None:
        """Have the engine let go of the model, if it holds more of it than torch knows."""
        if isinstance(self.engine, StepsItself):
            self.engine.close()


def assemble(config: RunConfig, build: Build, device: torch.device) -> Trainee:
    """Build a model, put adapters into it, prepare it, give it to an engine, and make its optimizer.

    Of several processes the first one builds it with weights, which then come to the others part by part, as the engine
    takes them. All results, random numbers included, are those of every process building the whole. Packed weights are
    built by every process. The run's record of GPU memory begins here.

    Raises:
        LongspanError: whatever of the model, the degrees, the kernel or the engine cannot work.
    """
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)  # what this process did before is not the run's
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    compute_dtype = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    engine = build_engine(config.engine, world_size, compute_dtype)
    model, origin = _build(config, build, device, engine.name, compute_dtype)
    handle = longspan.prepare(
        model,
        config.sequence_parallel_size,
        ulysses_degree=config.ulysses_degree,
        ring_degree=config.ring_degree,
        kv_exchange=config.kv_exchange,
        kernel=config.kernel,
        memory=config.memory.decided,
        grad_reduction=engine.grad_reduction,
        device=None if origin is None else device,
    )
    if handle.automatic is not None:
        handle.automatic.expect(config.optimizer.kind, config.optimizer.step_in_backward)
    meter = Meter(device, handle.mesh, model_work(model, model.config.get_text_config()))
    module = engine.wrap(model, handle, origin)
    return Trainee(model, module, handle, engine, _stepping(module, engine, config), meter, device)


def _build(
    config: RunConfig, build: Build, device: torch.device, engine: str, compute_dtype: torch.dtype | None
) -> tuple[Any, Origin | None]:
    """Return the model with its adapters: on its device, or without weights and where they come from."""
    kind = config.model.quantization
    model = blank_model(build, device, engine, compute_dtype) if kind == "none" else None
    if model is None:
        model = build(False)
        check_memory(model, device, kind)
        quantize_layers(model, kind, device)
        return add_adapter(model, config.adapter, config.seed).to(device).train(), None
    if is_first():
        check_host(model, config.model)
        model = build(False)
    model = add_adapter(model, config.adapter, config.seed).train()
    torch.set_rng_state(from_first(torch.get_rng_state()))  # where all would be if all had drawn the weights
    return model, Origin(model, device)


def _stepping(module: nn.Module, engine: Engine, config: RunConfig) -> Stepping:
    options = config.optimizer
    optimizer = build_optimizer(
        options.kind, module, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
    )
    return choose_stepping(optimizer, engine, options.step_in_backward, options.max_grad_norm)


def introduce(config: RunConfig, trainee: Trainee) -> str:
    """Say in one line what is trained, and on what."""
    mesh = trainee.mesh
    count = sum(whole_shape(parameter).numel() for parameter in trainee.model.parameters())
    trained = sum(whole_shape(p).numel() for p in trainee.model.parameters() if p.requires_grad)
    part = "" if trained == count else f", {trained:,} of them trained"
    return (
        f"{config.model.name}: {count:,} parameters{part}, engine {trainee.engine.name} on {mesh.world.size} "
        f"{trainee.device.type} process{'es' if mesh.world.size > 1 else ''}, sequence_length "
        f"{config.sequence_length:,}, sp {mesh.sequence.size} = ulysses {mesh.ulysses.size} x ring {mesh.ring.size}"
    )

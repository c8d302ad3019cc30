"""Put a model, an engine and an optimizer together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import longspan
from longspan.config import RunConfig
from longspan.engines import Engine, StepsItself, build_engine
from longspan.errors import ConfigError
from longspan.integrations.adapters import add_adapter
from longspan.integrations.quantize import needed_bytes, quantize_layers
from longspan.mesh import Mesh
from longspan.optim import Stepping, build_optimizer, choose_stepping
from longspan.plan.keep import Keep, Memory
from longspan.train.meter import Meter
from longspan.train.metrics import model_work
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


def assemble(config: RunConfig, model: Any, device: torch.device) -> Trainee:
    """Put adapters into a model, prepare it, give it to an engine, and make its optimizer.

    Raises:
        LongspanError: whatever of the model, the degrees, the kernel or the engine cannot work.
    """
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    compute_dtype = None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    engine = build_engine(config.engine, world_size, compute_dtype)
    check_memory(model, device, config.model.quantization)
    quantize_layers(model, config.model.quantization, device)
    model = add_adapter(model, config.adapter, config.seed).to(device).train()
    handle = longspan.prepare(
        model,
        config.sequence_parallel_size,
        ulysses_degree=config.ulysses_degree,
        ring_degree=config.ring_degree,
        kv_exchange=config.kv_exchange,
        kernel=config.kernel,
        memory="auto" if config.memory.keep == "auto" else Memory(config.memory.tile_tokens, Keep(config.memory.keep)),
        grad_reduction=engine.grad_reduction,
    )
    if handle.automatic is not None:
        handle.automatic.expect(config.optimizer.kind, config.optimizer.step_in_backward)
    meter = Meter(device, handle.mesh, model_work(model, model.config.get_text_config()))
    module = engine.wrap(model, handle)
    return Trainee(model, module, handle, engine, _stepping(module, engine, config), meter, device)


def check_memory(model: Any, device: torch.device, quantization: str = "none") -> None:
    """Refuse a model whose weights, packed if they will be, are more than a GPU has free; other devices are not asked.

    Raises:
        ConfigError: with both numbers.
    """
    if device.type != "cuda":
        return
    needed = needed_bytes(model, device, quantization)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if needed > free_bytes:
        raise ConfigError(
            f"The model's weights need {needed:,} bytes, but {device} has {free_bytes:,} bytes free, and each "
            "process builds the whole model before any sharding. Free the GPU, or take a smaller model or model.dtype."
        )


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

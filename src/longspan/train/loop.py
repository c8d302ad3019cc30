"""The training loop."""

from __future__ import annotations

import itertools
import math
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import longspan
from longspan.config import RunConfig
from longspan.engines import Engine, StepsItself, build_engine
from longspan.errors import ConfigError, TrainingError
from longspan.integrations.adapters import add_adapter, is_adapted
from longspan.integrations.models import build_model
from longspan.integrations.quantize import needed_bytes, quantize_layers
from longspan.integrations.saved import writer
from longspan.integrations.tokenizer import load_tokenizer
from longspan.mesh import Mesh
from longspan.optim import Stepping, build_optimizer, choose_stepping
from longspan.plan.keep import Keep, Memory
from longspan.train.checkpoint import CHECKPOINTS, METRICS, MODEL, clear_output, save_model
from longspan.train.checkpoints import Checkpoints
from longspan.train.data import Corpus
from longspan.train.meter import Meter
from longspan.train.metrics import MetricsFile, Row, model_work
from longspan.train.packing import Recipe, Step, steps
from longspan.train.progress import Progress
from longspan.train.record import Record
from longspan.train.resume import StopRequest, check_identity, identity, saveable
from longspan.train.schedule import learning_rate
from longspan.train.state import read_state, write_state
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


def train(config: RunConfig, corpus: Corpus, device: torch.device, progress: Progress | None, data: str = "") -> int:
    """Train as told and return the last step, which is `max_steps` unless SIGTERM came; every process calls this.

    After SIGTERM, on whichever process, all finish the step, write a checkpoint and leave.

    Args:
        device: of this process.
        progress: where to show the run; None on the ranks that do not.
        data: what became of the documents, in a line.

    Raises:
        TrainingError: a loss or gradient that is not finite; no step with one is recorded, or applied unless the
            optimizer steps in backward.
    """
    output_dir = Path(config.output_dir)
    tokenizer = load_tokenizer(config.data.tokenizer)
    trainee = assemble(config, build_model(config.model, config.seed, tokenizer), device)
    record = None
    if progress is not None:
        if not config.resume:
            clear_output(output_dir)
        record = Record(config, progress, trainee.handle, device, _introduce(config, trainee), data)
    with closing(trainee), record or nullcontext(), StopRequest(saveable(config)) as stop:
        last = _run_steps(config, corpus, trainee, record, stop)
        if config.save.final and last == config.max_steps:
            model, write = trainee.model, writer(trainee.model, tokenizer, config)
            save_model(model, output_dir / MODEL, write, trainee.engine.whole, trained=is_adapted(model))
    return last


def _run_steps(config: RunConfig, corpus: Corpus, trainee: Trainee, record: Record | None, stop: StopRequest) -> int:
    """Take all steps that are left, saving as told; return the last one's number."""
    output_dir = Path(config.output_dir)
    file = MetricsFile(output_dir / METRICS)
    recipe = Recipe(
        config.sequence_length,
        packing=config.data.packing,
        shuffle=config.data.shuffle,
        rows=config.micro_batch_size,
        accumulation=config.gradient_accumulation_steps,
        replicas=trainee.mesh.data.size,
        seed=config.seed,
    )
    saver = Saver(config, corpus, trainee)
    number = saver.resume(file, record) if config.resume else 0
    rows = saver.rows
    todo = itertools.islice(steps(corpus, recipe, trainee.mesh.data.rank, rows), config.max_steps - number)
    for step in trainee.meter.steps(todo):
        number, rows = number + 1, rows + recipe.step_rows
        row, stops = _run_step(trainee, step, number, config, stop)
        if record is not None:
            file.write(row)
            record.step(row)
        stops = stops and number < config.max_steps
        if stops or (config.save.every is not None and number % config.save.every == 0):
            saver.save(number, rows)
        if stops:
            if record is not None:
                record.note(f"stopped by SIGTERM after step {number}, which is saved; --resume goes on from it")
            break
    return number


class Saver:
    """Writes a run's checkpoints, and goes on from the last.

    Args:
        rows: of the data, that the steps before have taken.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, trainee: Trainee) -> None:
        self._checkpoints = Checkpoints(Path(config.output_dir) / CHECKPOINTS, config.save.keep)
        self._trainee, self._max_steps = trainee, config.max_steps
        self._identity = lru_cache(
            lambda: identity(config, corpus, trainee.engine.name, trainee.mesh.world.size)
        )  # reads all tokens, so only where it is needed
        self.rows = 0

    def save(self, step: int, rows: int) -> None:
        """Write a checkpoint. Collective."""
        about = {"rows": rows, "identity": self._identity()}
        self._checkpoints.save(step, about, lambda folder: write_state(folder, *self._state))

    def resume(self, file: MetricsFile, record: Record | None) -> int:
        """Go on from the last checkpoint that is whole, if there is one; return its step, else 0. Collective.

        Raises:
            ConfigError: it is another run's, or past `max_steps`.
            TrainingError: it cannot be read.
        """
        tell = (lambda text: None) if record is None else record.note
        saved = self._checkpoints.latest(tell)
        if saved is None:
            tell("there is no checkpoint to go on from: beginning")
            return 0
        if saved.step > self._max_steps:
            raise ConfigError(
                f"max_steps is {self._max_steps:,}, but checkpoint {saved.folder} was written after step "
                f"{saved.step:,}: set max_steps to that or more, or begin anew in another output_dir."
            )
        check_identity(saved, self._identity())
        read_state(saved.folder, *self._state)
        self.rows = int(saved.about["rows"])
        if record is not None:
            file.go_on(saved.step)
        tell(f"going on after step {saved.step}")
        return saved.step

    @property
    def _state(self) -> tuple[nn.Module, Engine, Stepping, torch.device]:
        trainee = self._trainee
        return trainee.model, trainee.engine, trainee.stepping, trainee.device


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


def _run_step(trainee: Trainee, step: Step, number: int, config: RunConfig, stop: StopRequest) -> tuple[Row, bool]:
    """Take a step; return its record, and whether some process has been told to stop."""
    meter = trainee.meter
    lr = learning_rate(number, config)
    trainee.stepping.begin(lr)
    loss = _backward(trainee, step)
    with meter.phase("optimizer"):
        norm = trainee.stepping.norm()
    loss_value, norm_value = torch.stack(
        [loss.double(), norm.double().to(loss.device)]
    ).tolist()  # the step's host sync
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        early = trainee.stepping.applied_early
        fate = "applied all the same; no model is saved" if early else "not applied"
        raise TrainingError(
            f"Step {number}: loss {loss_value}, gradient norm {norm_value}. The step was {fate}. "
            f"Lower optimizer.lr ({config.optimizer.lr:g}), lengthen schedule.warmup_steps, or look at the data."
        )
    with meter.phase("optimizer"):
        trainee.stepping.finish()
    row, (stops,) = meter.row(number, step, stop.came, loss=loss_value, grad_norm=norm_value, lr=lr)
    return row, stops


def _backward(trainee: Trainee, step: Step) -> Tensor:
    """Run a step's micro-batches forward and backward; return its loss, the same on every rank."""
    loss = torch.zeros((), device=trainee.device)
    phase = trainee.meter.phase
    for index, batch in enumerate(step.micro_batches, 1):
        with phase("data"):
            part = trainee.handle.shard(batch, num_items=step.num_items)
            part = {k: v.to(trainee.device) if isinstance(v, Tensor) else v for k, v in part.items()}
        with trainee.engine.accumulating(last=index == len(step.micro_batches)):
            with phase("forward"):
                out = trainee.module(**part)
            with phase("backward"):
                trainee.engine.backward(out.loss)
        loss += out.loss.detach()
    with phase("reduce"):
        trainee.engine.reduce()
    return loss


def _introduce(config: RunConfig, trainee: Trainee) -> str:
    mesh = trainee.mesh
    count = sum(whole_shape(parameter).numel() for parameter in trainee.model.parameters())
    trained = sum(whole_shape(p).numel() for p in trainee.model.parameters() if p.requires_grad)
    part = "" if trained == count else f", {trained:,} of them trained"
    return (
        f"{config.model.name}: {count:,} parameters{part}, engine {trainee.engine.name} on {mesh.world.size} "
        f"{trainee.device.type} process{'es' if mesh.world.size > 1 else ''}, sequence_length "
        f"{config.sequence_length:,}, sp {mesh.sequence.size} = ulysses {mesh.ulysses.size} x ring {mesh.ring.size}"
    )

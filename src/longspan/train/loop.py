"""The training loop."""

from __future__ import annotations

import itertools
from contextlib import closing, nullcontext
from pathlib import Path

import torch

from longspan.config import RunConfig
from longspan.integrations.adapters import is_adapted
from longspan.integrations.models import build_model
from longspan.integrations.saved import writer
from longspan.integrations.tokenizer import load_tokenizer
from longspan.once import is_first
from longspan.train.checkpoint import METRICS, MODEL, clear_output, save_model
from longspan.train.data import Corpus
from longspan.train.explain import explained
from longspan.train.metrics import MetricsFile
from longspan.train.packing import Recipe, steps
from longspan.train.progress import Progress
from longspan.train.pulse import Pulse
from longspan.train.record import Record
from longspan.train.resume import StopRequest
from longspan.train.saver import Saver
from longspan.train.shortage import advice
from longspan.train.step import Taken, not_finite, run_step
from longspan.train.supply import Supply
from longspan.train.trainee import Trainee, assemble, introduce
from longspan.train.watchdog import Watchdog, wait_longer

_BUILDING = (
    "The first process builds the whole model on its host, all others too where weights are packed; to a GPU they come "
    "whole before any sharding, but for engines fsdp2 and zero-3, which take a layer at a time: free memory, or take a "
    "smaller model or model.dtype."
)


def train(
    config: RunConfig,
    corpus: Corpus,
    device: torch.device,
    progress: Progress | None,
    data: str = "",
    run: str | None = None,
) -> int:
    """Train as told and return the last step, which is `max_steps` unless SIGTERM came; every process calls this.

    After SIGTERM, on whichever process, all finish the step, write a checkpoint and leave. What an earlier run has left
    is removed before anything else, so that a start that fails while building leaves nothing to go on from.

    Args:
        device: of this process.
        progress: where to show the run; None on the ranks that do not.
        data: what became of the documents, in a line.
        run: its name in run.json, by which another start finds that it is the same run; None draws one.

    Raises:
        TrainingError: too many steps with a loss or gradient that is not finite, too little memory, a process that is
            gone, or a disk that refuses.
    """
    output_dir, pulse = Path(config.output_dir), Pulse()
    with Watchdog(pulse, config.faults.timeout_minutes * 60, output_dir), explained(pulse, lambda: _BUILDING):
        if is_first() and not config.resume:
            clear_output(output_dir)
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.chat_template)
        trainee = assemble(config, lambda blank: build_model(config.model, config.seed, tokenizer, blank), device)
        wait_longer(config.faults.timeout_minutes * 60)
        record = None
        if progress is not None:
            record = Record(config, progress, trainee.handle, device, introduce(config, trainee), data, run)
        with (
            closing(trainee),
            record or nullcontext(),
            StopRequest() as stop,
            explained(pulse, lambda: advice(config, trainee)),
        ):
            last = _run_steps(config, corpus, trainee, record, stop, pulse)
            if config.save.final and last == config.max_steps:
                pulse.enter("writing the model")
                model, write = trainee.model, writer(trainee.model, tokenizer, config)
                save_model(model, output_dir / MODEL, write, trainee.engine.whole, trained=is_adapted(model))
    return last


def _run_steps(
    config: RunConfig, corpus: Corpus, trainee: Trainee, record: Record | None, stop: StopRequest, pulse: Pulse
) -> int:
    """Take all steps that are left, saving as told; return the last one's number."""
    file = MetricsFile(Path(config.output_dir) / METRICS)
    recipe = Recipe(
        config.sequence_length,
        packing=config.data.packing,
        strategy=config.data.packing_strategy,
        shuffle=config.data.shuffle,
        rows=config.micro_batch_size,
        accumulation=config.gradient_accumulation_steps,
        replicas=trainee.mesh.data.size,
        seed=config.seed,
    )
    saver = Saver(config, corpus, trainee)
    pulse.enter("reading the checkpoint")
    number = saver.resume(file, record) if config.resume else 0
    pulse.enter("reading data", number + 1)
    data = trainee.mesh.data
    dealt = itertools.islice(steps(corpus, recipe, data.rank, saver.rows), config.max_steps - number)
    supply = Supply(dealt, trainee.handle.shard, data, number + 1)
    for step in trainee.meter.steps(supply):
        number, saver.rows = number + 1, saver.rows + recipe.step_rows
        taken = run_step(trainee, step, number, config, pulse, supply, lambda: (stop.came, saver.busy))
        _check_finite(taken, config, trainee, saver)
        if record is not None:
            file.write(taken.row)
            record.step(taken.row)
        stops, busy, failed = taken.flags
        supply.told(failed)
        pulse.enter("saving")
        if not busy:
            saver.settle()
        stops = stops and number < config.max_steps
        if stops or (config.save.every is not None and number % config.save.every == 0):
            saver.begin(number)
        if stops:
            saver.settle()
            if record is not None:
                record.note(f"stopped by SIGTERM after step {number}, which is saved; --resume goes on from it")
            break
        if failed:
            saver.settle()  # taking the next step will raise
        pulse.beat()
        pulse.enter("reading data", number + 1)
    pulse.enter("saving", number)
    saver.settle()
    pulse.beat()
    return number


def _check_finite(taken: Taken, config: RunConfig, trainee: Trainee, saver: Saver) -> None:
    """Count a step that was skipped; settle what is saved, and stop, if it is one too many.

    Raises:
        TrainingError: it is.
    """
    saver.skipped = saver.skipped + 1 if taken.row.skipped else 0
    allowed = config.faults.max_skipped_steps if config.faults.on_nonfinite == "skip" else 0
    if saver.skipped > allowed:
        saver.settle()
        raise not_finite(taken.row, config, trainee.stepping.applied_early, saver.skipped)

"""Check a run before any process starts: everything that can be known without the model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longspan.config import MemoryConfig, RunConfig
from longspan.engines import build_engine
from longspan.errors import ConfigError, TopologyError
from longspan.integrations.adapters import check_adapter
from longspan.integrations.encoding import Encoder
from longspan.integrations.models import check_fit, load_model_config
from longspan.integrations.quantize import check_quantization
from longspan.integrations.refusals import head_counts
from longspan.integrations.tokenizer import load_tokenizer
from longspan.optim import check_kind
from longspan.plan.degrees import choose_degrees
from longspan.stream.arena import FileArena
from longspan.train.checkpoint import check_output, try_output
from longspan.train.data import Corpus, Report, read_corpus
from longspan.train.loggers import check_loggers


def preflight(config: RunConfig, world_size: int) -> tuple[Corpus, Report]:
    """Check the output folder, the optimizer, the engine, the degrees, the model, what it keeps, and return the data.

    What the folder may hold is not checked: see `check_output` and `goes_on`. It is there once all else is right.

    Raises:
        LongspanError: the first of them that cannot work.
    """
    check_output(Path(config.output_dir), overwrite=True)
    check_loggers(config.logging)
    check_kind(config.optimizer.kind)
    engine = build_engine(
        config.engine, world_size, None if config.compute_dtype is None else getattr(torch, config.compute_dtype)
    )
    check_adapter(config.adapter)
    check_quantization(config.model.quantization, engine.name)
    if config.optimizer.step_in_backward and world_size > 1:
        raise TopologyError(
            f"optimizer.step_in_backward serves one process, not {world_size}, as gradients are reduced after it. "
            "Start one (--nproc 1), or turn it off (--no-optimizer-step-in-backward)."
        )
    size = config.sequence_parallel_size
    if world_size % size:
        raise TopologyError(
            f"sequence_parallel_size {size} does not divide the {world_size} process{'es' if world_size > 1 else ''}. "
            f"Start a multiple of {size} (--nproc {size}), or set sequence_parallel_size to a divisor of {world_size}."
        )
    model_config = load_model_config(config.model)
    # raises where the heads cannot serve the degrees
    choose_degrees(*head_counts(model_config), size, ulysses=config.ulysses_degree, ring=config.ring_degree)
    _check_memory(config.memory, model_config)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.chat_template)
    corpus, report = read_corpus(config.data, config.sequence_length, Encoder(tokenizer, config.data.targets))
    largest = max(int(ids.max()) for ids in (corpus.tokens, corpus.labels) if ids is not None)
    check_fit(model_config, max(corpus.lengths_tokens), largest)
    try_output(Path(config.output_dir))
    return corpus, report


def _check_memory(config: MemoryConfig, model_config: Any) -> None:
    """Raise unless each of the model's layers has its decision, and the directory takes a file."""
    memory = config.decided
    if memory == "auto":
        return
    try:
        memory.check_layers(model_config.get_text_config().num_hidden_layers)
        if memory.budget.directory is not None:
            FileArena(memory.budget.directory).file.close()
    except ConfigError as error:
        raise ConfigError(f"memory: {error}") from None

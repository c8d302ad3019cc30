"""Short runs that save and go on, for tests of what may happen to them."""

from __future__ import annotations

import io
import json
import os
import signal
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from launched import launched
from longspan.config import RunConfig, parse_config
from longspan.train import loop
from longspan.train.data import Corpus
from longspan.train.progress import Progress
from longspan.train.writing import Writing

STEPS = 6


def written(writing: Writing) -> bool:
    """Wait until a checkpoint is written; say that it is."""
    wait([writing._written])
    return False


class Killed(Exception):
    """Stands for the end of a process."""


def corpus() -> Corpus:
    lengths = torch.randint(9, 40, (23,), generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(0, 257, (int(lengths.sum()),), generator=torch.Generator().manual_seed(2))
    return Corpus(tokens.int(), None, torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]))


def config_of(folder: str, **changes: Any) -> RunConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 257}
    values: dict[str, Any] = {
        "model": {"name": "tiny-llama", "init": "random", "overrides": sizes},
        "data": {"files": "a"},
        "sequence_length": 64,
        "max_steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
        "schedule": {"kind": "cosine", "warmup_steps": 2},
        "gradient_accumulation_steps": 2,
        "sequence_parallel_size": 2,
        "engine": "fsdp2",
        "output_dir": folder,
        "save": {"every": 2, "keep": 2},
        "logging": {"to": []},
    }
    return parse_config({**values, **changes})


def run(config: RunConfig, killed_in: int = 0, stopped_in: int = 0) -> tuple[int, str]:
    """Train in this process; return the last step, and what was told. The process dies, or gets SIGTERM, in a step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    told, plain = io.StringIO(), loop.run_step

    def step(trainee: Any, data: Any, number: int, *rest: Any) -> Any:
        if number == killed_in:
            raise Killed
        if number == stopped_in and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(trainee, data, number, *rest)

    with ExitStack() as stack:
        if config.engine.startswith("zero"):
            stack.enter_context(launched())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # torchao compiles a step per shape
        stack.enter_context(patch.object(loop, "run_step", step))
        stack.enter_context(patch.object(Writing, "busy", property(written)))  # settled at the next step, each time
        try:
            last = loop.train(config, corpus(), torch.device("cpu"), None if rank else Progress(told, STEPS))
        except Killed:
            last = killed_in - 1
    return last, told.getvalue()


def result(folder: str) -> tuple[list[Any], dict[str, bytes]]:
    """Return what a run has recorded of each step, and its saved model."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [[json.loads(line)[name] for name in ("step", "loss", "grad_norm", "lr", "tokens")] for line in lines]
    return rows, {path.name: path.read_bytes() for path in sorted((Path(folder) / "model").glob("*.safetensors"))}

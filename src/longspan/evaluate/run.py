"""The whole evaluation of a named model, as one of the processes that share its rows."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

import longspan
from longspan.engines import Origin, build_engine
from longspan.errors import ConfigError
from longspan.evaluate.haystack import STDLIB, Haystack
from longspan.evaluate.needle import check_lengths, evaluate
from longspan.evaluate.prompts import Prompts
from longspan.evaluate.settings import NeedleSettings
from longspan.evaluate.source import Source
from longspan.integrations.transformers import prepare
from longspan.keep import Keep, Memory
from longspan.once import is_first
from longspan.train.room import blank_model, check_host, check_memory

_DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class Asked:
    """Say which model runs, on what and how, and what it is to find.

    Args:
        model: a preset, a folder, a run's output folder or a hub id.
        haystack: files or patterns of text.
        tokenizer: in place of the model's own.
        sp: processes that share a row; there may be a multiple of them.
        ulysses, ring: None to choose.
        kernel: of attention.
        engine: who holds parameters: `single` (each process all of them) or `fsdp2`.
        tile_tokens: tokens of a process on which a layer runs at a time.
        dtype: of the model; None for bfloat16 on GPUs and float32 on CPUs.
    """

    needle: NeedleSettings
    model: str
    haystack: tuple[str, ...] = (STDLIB,)
    tokenizer: str | None = None
    sp: int = 1
    ulysses: int | None = None
    ring: int | None = None
    kernel: str = "auto"
    engine: Literal["single", "fsdp2"] = "single"
    tile_tokens: int = 8192
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_DTYPES):
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}.")
        if self.tile_tokens < 1:
            raise ConfigError(f"tile_tokens must be at least 1, got {self.tile_tokens}.")
        if self.engine not in ("single", "fsdp2"):
            raise ConfigError(f"engine must be single or fsdp2, got {self.engine!r}.")


def run_needle(asked: Asked, device: torch.device) -> dict[str, Any] | None:
    """Evaluate; call it on every process.

    Args:
        device: this process's.

    Returns:
        On the first process what `needle.json` holds; None on the others.

    Raises:
        LongspanError: what cannot work, with the way out; rows are made, and room is looked for, before weights are
            loaded.
    """
    source = Source.of(asked.model)
    check_lengths(source.config(), asked.needle)
    tokenizer = source.tokenizer(asked.tokenizer)
    longest = max(asked.needle.lengths)
    haystack = Haystack.read(asked.haystack, tokenizer, 2 * longest)
    prompts = Prompts(tokenizer, haystack, asked.needle)
    prompts.rows()  # raises where a row cannot be made
    dtype = asked.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    model, origin = _model(source, dtype, device, asked.engine)
    handle = prepare(
        model,
        asked.sp,
        ulysses_degree=asked.ulysses,
        ring_degree=asked.ring,
        kernel=asked.kernel,
        memory=Memory(
            asked.tile_tokens, Keep.X_O
        ),  # without gradients nothing is kept, and tiles bound what is at work
        device=None if origin is None else device,
    )
    module = build_engine(asked.engine, handle.mesh.world.size).wrap(model, handle, origin)
    cells = evaluate(handle, prompts, module)
    if not is_first():
        return None
    plan = handle.plan
    return {
        "evaluation": "needle",
        "model": asked.model,
        "score": sum(cell["matches"] for cell in cells) / sum(cell["trials"] for cell in cells),
        "cells": cells,
        "settings": asdict(asked),
        "haystack": {"files": haystack.files, "tokens": len(haystack), "repeated": len(haystack) < longest},
        "processes": handle.mesh.world.size,
        "sequence_parallel_size": asked.sp,
        "ulysses_degree": plan.ulysses_degree,
        "ring_degree": plan.ring_degree,
        "kernel": plan.kernel,
        "dtype": dtype,
        "device": device.type,
        "versions": {
            "longspan": longspan.__version__,
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
        },
    }


def _model(source: Source, dtype: str, device: torch.device, engine: str) -> tuple[nn.Module, Origin | None]:
    """Return the model on its device; of several processes the first builds it, and where its weights come from."""
    model = blank_model(lambda blank: source.model(dtype, blank), device, engine, None)
    if model is None:
        model = source.model(dtype)
        check_memory(model, device)
        return model.to(device), None
    if is_first():
        check_host(model, source.settings(dtype))
        model = source.model(dtype)
    return model, Origin(model, device)

"""What a run saves: a whole model, or adapters and how their base was made; and one model made of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from longspan.config import ModelConfig, RunConfig
from longspan.errors import ConfigError
from longspan.integrations.adapters import is_adapted, write_adapter
from longspan.integrations.models import build_model, write_pretrained
from longspan.integrations.quantize import dequantize_layers, quantize_layers
from longspan.integrations.tokenizer import load_tokenizer

ADAPTER = "adapter_config.json"
BASE = "longspan.json"
"""Beside adapters: the settings that their base model was made from."""

Write = Callable[[Path, dict[str, Tensor]], None]


def writer(model: Any, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> Write:
    """Return what writes a model's state to a folder, with its config and tokenizer: all of it, or its adapters."""

    def write(folder: Path, state: dict[str, Tensor]) -> None:
        if not is_adapted(model):
            write_pretrained(model, tokenizer, folder, state)
            return
        write_adapter(model, folder, state)
        tokenizer.save_pretrained(folder)
        base = {"model": config.model.model_dump(), "seed": config.seed}
        (folder / BASE).write_text(json.dumps(base, indent=2), encoding="utf-8")

    return write


def merged_model(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build the model that adapters were trained in, on the CPU, and fold them into its weights.

    Weights that were packed while training are folded as what they stood for, so the result computes what was trained.

    Raises:
        ConfigError: the base model cannot be found or does not fit.
    """
    from peft import PeftModel

    tokenizer = load_tokenizer(str(folder))
    model, seed = base_settings(folder)
    base = build_model(model, seed, tokenizer)
    if model.quantization != "none":
        quantize_layers(base, model.quantization, torch.device("cpu"))
        dequantize_layers(base)
    shared = _part(base)
    try:
        adapted: Any = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
        merged = adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"The adapters in {folder} cannot be merged: {str(error).strip().splitlines()[0]}") from None
    if shared:
        _join(merged)
    return merged.to(getattr(torch, model.dtype)), tokenizer


def base_settings(folder: Path) -> tuple[ModelConfig, int]:
    """Return the settings of the model that adapters belong to, and the seed of random weights.

    Raises:
        ConfigError: the adapters do not say which model that is.
    """
    if (folder / BASE).is_file():
        known = json.loads((folder / BASE).read_text(encoding="utf-8"))
        return ModelConfig.model_validate(known["model"]), known["seed"]
    name = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise ConfigError(
            f"{folder / ADAPTER} does not say which model its adapters belong to (base_model_name_or_path)."
        )
    return ModelConfig(name=name), 0


def _part(model: PreTrainedModel) -> bool:
    """Give the head a weight of its own if it shares the embedding's, so that what is folded into one leaves the
    other; return whether it did."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    shared = bool(head.weight is embedding.weight)
    if shared:
        head.weight = nn.Parameter(head.weight.detach().clone())
    return shared


def _join(model: PreTrainedModel) -> None:
    """Let head and embedding share their weight again if they are still equal, and say so in the config."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    model.config.tie_word_embeddings = torch.equal(head.weight, embedding.weight)
    if model.config.tie_word_embeddings:
        head.weight = embedding.weight

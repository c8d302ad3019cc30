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
    model, seed = _base(folder)
    base = build_model(model, seed, tokenizer)
    if model.quantization != "none":
        quantize_layers(base, model.quantization, torch.device("cpu"))
        dequantize_layers(base)
    _untie(base, json.loads((folder / ADAPTER).read_text(encoding="utf-8")))
    try:
        adapted: Any = PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
        merged = adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"The adapters in {folder} cannot be merged: {str(error).strip().splitlines()[0]}") from None
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    merged.config.tie_word_embeddings = head.weight is embedding.weight
    return merged.to(getattr(torch, model.dtype)), tokenizer


def _base(folder: Path) -> tuple[ModelConfig, int]:
    """Return the settings of the base model, and the seed of random weights."""
    if (folder / BASE).is_file():
        known = json.loads((folder / BASE).read_text(encoding="utf-8"))
        return ModelConfig.model_validate(known["model"]), known["seed"]
    name = json.loads((folder / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise ConfigError(
            f"{folder / ADAPTER} does not say which model its adapters belong to (base_model_name_or_path)."
        )
    return ModelConfig(name=name), 0


def _untie(model: PreTrainedModel, adapter: dict[str, Any]) -> None:
    """Part a head from its embedding where only one of them has changed: folded in, the other would change too."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight or adapter.get("ensure_weight_tying"):
        return
    targets = adapter.get("target_modules") or ()
    touched = (*([targets] if isinstance(targets, str) else targets), *(adapter.get("modules_to_save") or ()))
    ends = {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if m is head or m is embedding}
    if any(name.rsplit(".", 1)[-1] in ends for name in touched):
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False

"""Adapters of PEFT: put into a model, and saved without the model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.config import AdapterConfig
from longspan.errors import ConfigError


def check_adapter(adapter: AdapterConfig) -> None:
    """Refuse adapters where PEFT is not installed.

    Raises:
        ConfigError: with the way out.
    """
    if adapter.kind != "none" and importlib.util.find_spec("peft") is None:
        raise ConfigError("adapter.kind: lora needs PEFT, which is not installed: pip install 'longspan[peft]'.")


def add_adapter(model: PreTrainedModel, adapter: AdapterConfig, seed: int) -> nn.Module:
    """Freeze a model and put adapters into it; the model itself for kind `none`.

    Args:
        seed: of the adapters' weights, the same on every process.

    Returns:
        A PEFT model. Adapters have the type `adapter.dtype`, modules that are trained whole keep theirs.

    Raises:
        ConfigError: names that are no modules of the model.
    """
    if adapter.kind == "none":
        return model
    check_adapter(adapter)
    from peft import LoraConfig, get_peft_model

    _check_names(model, "modules_to_save", adapter.modules_to_save)
    targets: Any = list(adapter.target_modules)
    if targets == ["all-linear"]:
        targets = "all-linear"
    else:
        _check_names(model, "target_modules", adapter.target_modules)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=adapter.dropout,
        target_modules=targets,
        modules_to_save=list(adapter.modules_to_save) or None,
    )
    torch.manual_seed(seed)
    try:
        found = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"adapter: PEFT cannot adapt this model: {str(error).splitlines()[0]}") from None
    dtype = model.dtype if adapter.dtype is None else getattr(torch, adapter.dtype)
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return found


def is_adapted(model: nn.Module) -> bool:
    """Tell whether a model is one of PEFT."""
    return hasattr(model, "peft_config")


def write_adapter(model: Any, folder: Path, state: dict[str, Tensor]) -> None:
    """Write what `PeftModel.from_pretrained(base, folder)` reads, and the config of the base model.

    Args:
        state: at least all parameters that are trained, by their names in `model`.
    """
    base = model.get_base_model()
    name = str(getattr(base, "name_or_path", ""))
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(Path(name).absolute()) if name and Path(name).is_dir() else name or None
    model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
    base.config.save_pretrained(folder)


def _check_names(model: nn.Module, setting: str, names: tuple[str, ...]) -> None:
    modules = [name for name, _ in model.named_modules()]
    for name in names:
        if not any(module == name or module.endswith(f".{name}") for module in modules):
            adaptable = (n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding))
            ends = ", ".join(sorted({n.rsplit(".", 1)[-1] for n in adaptable}))
            raise ConfigError(f"adapter.{setting}: the model has no module {name!r}. It has {ends}.")

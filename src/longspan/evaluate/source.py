"""The model to evaluate: a preset, a folder, a hub id, or what a run of ours saved, adapters included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.config import ModelConfig
from longspan.errors import ConfigError
from longspan.integrations.models import build_model, load_model_config
from longspan.integrations.presets import PRESETS
from longspan.integrations.saved import ADAPTER, base_settings, merged_model
from longspan.integrations.tokenizer import load_tokenizer
from longspan.train.checkpoint import CHECKPOINTS, METRICS, MODEL


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Args:
        name: a preset (random weights, a byte per token), a folder or a hub id.
        adapted: the folder holds adapters; they are folded into the model that they were trained in.
    """

    name: str
    adapted: bool = False

    @classmethod
    def of(cls, name: str) -> Source:
        """Find out what a name means; a run's output folder stands for the model in it.

        Raises:
            ConfigError: a run's output folder without a saved model.
        """
        folder = Path(name)
        if (folder / MODEL).is_dir():
            folder = folder / MODEL
        elif (folder / METRICS).is_file() or (folder / CHECKPOINTS).is_dir():
            raise ConfigError(f"{name} is the output folder of a run that has saved no model (save.final).")
        known = folder.is_dir() and name not in PRESETS
        return cls(str(folder) if known else name, known and (folder / ADAPTER).is_file())

    def tokenizer(self, name: str | None = None) -> Any:
        """Load the model's tokenizer, or another one.

        Raises:
            ConfigError: there is none.
        """
        try:
            return load_tokenizer(name or ("bytes" if self.name in PRESETS else self.name))
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.tokenizer", "tokenizer")) from None

    def config(self) -> Any:
        """Read the model's configuration.

        Raises:
            ConfigError: there is no such model.
        """
        return load_model_config(self.settings("float32"))

    def model(self, dtype: str, blank: bool = False) -> Any:
        """Build the model on the CPU, in evaluation mode.

        Args:
            blank: build it on the meta device, without any weights.

        Raises:
            ConfigError: its weights cannot be loaded.
        """
        if self.adapted and not blank:
            model: Any = merged_model(Path(self.name))[0]
        else:
            model = build_model(self.settings(dtype), seed=0, blank=blank)
        return (model.to(getattr(torch, dtype)) if self.adapted else model).eval()

    def settings(self, dtype: Any) -> ModelConfig:
        """Return the settings of the model, where adapters are of the one that they belong to, in its own type."""
        if self.adapted:
            return base_settings(Path(self.name))[0]
        return ModelConfig(name=self.name, init="random" if self.name in PRESETS else "pretrained", dtype=dtype)

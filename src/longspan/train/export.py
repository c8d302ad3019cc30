"""Bring what a run saved into a folder that other programs read."""

from __future__ import annotations

import shutil
from pathlib import Path

from longspan.errors import ConfigError
from longspan.integrations.models import write_pretrained
from longspan.integrations.saved import ADAPTER, merged_model
from longspan.train.checkpoint import MODEL, check_output, write_folder


def export(source: Path, out: Path, merge: bool) -> str:
    """Write a run's model to a folder: safetensors, config.json and the tokenizer's files.

    Args:
        source: a run's output folder, or the folder of a saved model or adapter.
        merge: fold adapters into the model that they were trained in.

    Returns:
        What was written, in a few words.

    Raises:
        ConfigError: there is no model, nothing to merge, or no room for the result.
    """
    folder = source / MODEL if (source / MODEL).is_dir() else source
    if not (folder / "config.json").is_file() and not (folder / ADAPTER).is_file():
        raise ConfigError(
            f"{source} is neither a run's output folder with a saved model (save.final) nor the folder of one."
        )
    adapted = (folder / ADAPTER).is_file()
    if merge and not adapted:
        raise ConfigError(f"{folder} holds a whole model, so there are no adapters to merge; leave --merge out.")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds no weights as safetensors.")
    check_output(out, overwrite=False, name="--out")
    if not merge:
        write_folder(out, lambda partial: shutil.copytree(folder, partial, dirs_exist_ok=True))
        return "adapters" if adapted else "model"
    model, tokenizer = merged_model(folder)
    write_folder(out, lambda partial: write_pretrained(model, tokenizer, partial, dict(model.state_dict())))
    return "model with its adapters merged"

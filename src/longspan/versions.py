"""Which versions of other packages are here, and which ones longspan is known to be exact with."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re

import longspan
from longspan.errors import ConfigError

SUPPORTED: dict[str, tuple[str, str | None]] = {
    "torch": ("2.11", None),
    "transformers": ("5.17", "6"),
    "deepspeed": ("0.19.8", "0.20"),
}
"""From the first version up to, and without, the second; pyproject.toml says the same to installers."""

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
EXTRAS = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "flash-attn-4",
    "flash-linear-attention",
    "liger-kernel",
    "matplotlib",
    "peft",
    "tensorboard",
    "torchao",
    "trackio",
    "trl",
    "wandb",
)


def versions() -> dict[str, str | None]:
    """Return what is installed, None for what is not."""
    own = {"python": platform.python_version(), "longspan": longspan.__version__}
    return {**own, **{name: installed(name) for name in (*PACKAGES, *EXTRAS)}}


def check_versions() -> None:
    """Refuse to work with a torch or a transformers that longspan is not known to be exact with.

    Raises:
        ConfigError: names what is found and what is needed.
    """
    for package in ("torch", "transformers"):
        if reason := refusal(package):
            raise ConfigError(
                f"longspan needs {reason}: pip install 'longspan=={longspan.__version__}' installs what fits."
            )


def refusal(package: str) -> str | None:
    """Say what is needed and what was found, where that is missing or out of range; None where it will do.

    Pre-releases and local builds (5.25.0.dev0, 2.13.0+cpu) count as the release that they lead to.
    """
    low, high = SUPPORTED[package]
    needed = f"{package} >= {low}" + (f", < {high}" if high else "")
    found = installed(package) or _imported(package)
    if found is None:
        return f"{needed}, which is not installed"
    numbers = _numbers(found)
    if numbers < _numbers(low) or (high and numbers >= _numbers(high)):
        return f"{needed}, found {found}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers, without an epoch and zeros at the end, so that 6 and 6.0.0 are alike."""
    found = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in found[1].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def installed(package: str) -> str | None:
    """Return the version of a package as its installer noted it, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _imported(package: str) -> str | None:
    """Return the version that a package tells itself, as one run from its sources does."""
    try:
        return getattr(importlib.import_module(package), "__version__", None)
    except ImportError:
        return None

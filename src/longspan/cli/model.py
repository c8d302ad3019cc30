"""The model that a flag names."""

from __future__ import annotations

from typing import Any

from longspan.errors import ConfigError


def named_config(name: str, **overrides: Any) -> Any:
    """Read the configuration of `--model`.

    Args:
        overrides: fields to replace.

    Raises:
        ConfigError: there is none, or no sense in it.
    """
    from longspan.config import ModelConfig
    from longspan.integrations.models import load_model_config

    try:
        return load_model_config(ModelConfig(name=name, init="random", overrides=overrides))
    except ConfigError as error:
        raise ConfigError(f"--model: {str(error).removeprefix('model.name: ')}") from None
    except Exception as error:  # what is wrong with a file shows in many ways
        raise ConfigError(f"--model: cannot read {name!r} ({type(error).__name__}: {error})") from None

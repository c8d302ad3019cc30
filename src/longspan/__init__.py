"""longspan: exact training of Hugging Face causal language models on sequences divided over ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan.attention.axes import make_mesh
    from longspan.attention.build import attend
    from longspan.attention.schedule import Schedule
    from longspan.integrations.planning import plan
    from longspan.integrations.transformers.prepare import prepare
    from longspan.keep import Budget, Keep, Memory
    from longspan.layout import Layout
    from longspan.loss import Head, LossOptions, reduce_loss, tiled_loss, token_logps
    from longspan.mask import Mask
    from longspan.mlp import tiled_mlp
    from longspan.offload import offload_checkpoints
    from longspan.tiled import tile

__version__ = "0.1.0"

_HOMES = {
    "Budget": "longspan.keep",
    "Head": "longspan.loss",
    "Keep": "longspan.keep",
    "Layout": "longspan.layout",
    "LossOptions": "longspan.loss",
    "Mask": "longspan.mask",
    "Memory": "longspan.keep",
    "Schedule": "longspan.attention.schedule",
    "attend": "longspan.attention.build",
    "make_mesh": "longspan.attention.axes",
    "offload_checkpoints": "longspan.offload",
    "prepare": "longspan.integrations.transformers.prepare",
    "reduce_loss": "longspan.loss",
    "tile": "longspan.tiled",
    "tiled_loss": "longspan.loss",
    "tiled_mlp": "longspan.mlp",
    "token_logps": "longspan.loss",
}

__all__ = [
    "Budget",
    "Head",
    "Keep",
    "Layout",
    "LossOptions",
    "Mask",
    "Memory",
    "Schedule",
    "attend",
    "make_mesh",
    "offload_checkpoints",
    "plan",
    "prepare",
    "reduce_loss",
    "tile",
    "tiled_loss",
    "tiled_mlp",
    "token_logps",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `import longspan` loads neither torch nor transformers."""
    if name == "plan":  # a package that can be called
        return import_module("longspan.plan")
    if name not in _HOMES:
        raise AttributeError(f"module 'longspan' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""A plan as a run's YAML."""

from __future__ import annotations

from typing import Any

import yaml

from longspan.config import AdapterConfig, ModelConfig, parse_config
from longspan.errors import ConfigError
from longspan.integrations.models import load_model_config
from longspan.integrations.positions import window_tokens
from longspan.integrations.presets import PRESETS
from longspan.plan.plan import Plan
from longspan.plan.setup import IN_BACKWARD
from longspan.report.words import short

_HEAD = """\
# {about}
# `longspan train` takes this file as it is. Put your own files into data (longspan train --help lists all settings);
# with {keep}.
"""

_KEEP = "memory.keep: auto, the default, layers keep what the plan for the machine at hand decides"


def run_yaml(plan: Plan, model: str, adapter: AdapterConfig | None, gpus: int | None) -> str:
    """Return the settings of a run that trains as planned.

    Args:
        model: the name that was planned.
        gpus: how many; None on a CPU.

    Raises:
        ConfigError: `longspan train` cannot hold parameters as the plan does.
    """
    preset = model in PRESETS
    values: dict[str, Any] = {
        "model": {"name": model, **_positions(plan, model), **_dtype(plan, adapter, gpus)},
        "data": {
            "files": ["${stdlib}/[a-z]*.py"],
            "tokenizer": "bytes" if preset else model,
            "long_documents": "split",
        },
        "sequence_length": plan.seq_len,
        "sequence_parallel_size": plan.sequence_parallel_size,
        "ulysses_degree": plan.ulysses_degree,
        "ring_degree": plan.ring_degree,
        "engine": plan.engine,
        **({"compute_dtype": "bfloat16"} if _mixed(plan, adapter, gpus) else {}),
        "optimizer": _optimizer(plan),
        "max_steps": 100,
        "output_dir": f"out/{model.rstrip('/').rsplit('/', 1)[-1]}-{plan.seq_len}",
    }
    if adapter is not None:
        values["adapter"] = adapter.model_dump(mode="json", exclude_defaults=True)
    parse_config(yaml.safe_load(yaml.safe_dump(values)))  # what is told to be taken is taken
    where = "a CPU" if gpus is None else f"{gpus} GPU{'s' * (gpus > 1)}"
    about = f"{model}, rows of {plan.seq_len:,} tokens on {where}: {short(plan.step_s or 0)} s a step expected."
    return _HEAD.format(about=about, keep=_KEEP) + yaml.safe_dump(values, sort_keys=False)


def _positions(plan: Plan, model: str) -> dict[str, Any]:
    """Return what a model needs for rows that are longer than its positions; a preset has no weights that knew them.

    Raises:
        ConfigError: a model with weights, whose positions must be stretched.
    """
    tokens = plan.seq_len or 0
    known = window_tokens(load_model_config(ModelConfig(name=model, init="random")))
    longer = known is not None and tokens > known
    if model in PRESETS:
        return {"init": "random", **({"overrides": {"max_position_embeddings": tokens}} if longer else {})}
    if longer:
        raise ConfigError(
            f"{model} knows {known:,} positions, fewer than rows of {tokens:,} tokens: plan for at most {known:,}, or "
            "write the run's YAML by hand, with model.rope to stretch them."
        )
    return {}


def _mixed(plan: Plan, adapter: AdapterConfig | None, gpus: int | None) -> bool:
    """Whether float32 parameters are computed with in bfloat16."""
    return gpus is not None and adapter is None and plan.optimizer in ("adamw", "adamw8bit")


def _dtype(plan: Plan, adapter: AdapterConfig | None, gpus: int | None) -> dict[str, str]:
    if _mixed(plan, adapter, gpus) and plan.engine in ("single", "ddp", "zero-0"):
        raise ConfigError(
            f"The plan has float32 parameters under engine {plan.engine} and computes in bfloat16, which `longspan "
            "train` does with fsdp2 and zero-1 to zero-3: plan with --engine fsdp2, or --optimizer adamw-bf16-sr."
        )
    bf16 = gpus is not None and not _mixed(plan, adapter, gpus)
    return {"dtype": "bfloat16"} if bf16 else {}


def _optimizer(plan: Plan) -> dict[str, Any]:
    chosen: dict[str, Any] = {"kind": plan.optimizer}
    if plan.engine == "single" and plan.optimizer in IN_BACKWARD:
        chosen |= {"step_in_backward": True, "clip": "previous"}
    return chosen

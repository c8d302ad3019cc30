"""Registration of sequence-parallel attention in transformers, as scripts for DeepSpeed's ALST ask for it."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch.distributed as dist
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from longspan.attention.axes import make_mesh
from longspan.engines.mpu import MPU
from longspan.engines.zero import check_version
from longspan.errors import ConfigError, ModelError, TopologyError
from longspan.integrations.deepspeed.contexts import Contexts
from longspan.integrations.deepspeed.intercept import (
    Interception,
    Registration,
    identity_of,
    interceptions,
)
from longspan.integrations.refusals import head_counts
from longspan.once import tell

_HUB = re.compile(r"[^/:|]+/[^/:|]+(@[^/:]+)?(:[^/:]+)?")
"""A kernel on the Hugging Face Hub, `org/name[@revision][:function]`."""


class UlyssesSPAttentionHF:
    """Divide the attention of transformers' models over ranks, by the name of their attention implementation.

    The models stay as they are: each rank feeds them its part of the rows, as `UlyssesSPDataLoaderAdapter` cuts them,
    and gets its part of the logits, and a loss of its own tokens if it asks for one.
    """

    @classmethod
    def register_with_transformers(  # the signature is DeepSpeed's
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        **deprecated: int | None,
    ) -> MPU | None:
        """Make attention of this name work on rows that `sequence_parallel_size` ranks share.

        Models that use the name are served, whenever they were or will be loaded. Call it on every process. Calling it
        again for the same config and settings changes nothing; each config has its own settings.

        Args:
            model_name_or_path: name on the Hub, path, config, or model, inside PEFT or not.
            core_attn_implementation: the attention implementation that models use.
            sequence_parallel_size: ranks that share a row; 1 does nothing.
            micro_batch_size: rows per batch; batches of other sizes are served too.
            seq_length: tokens per row over all ranks, where it is fixed.
            seq_length_is_variable: False holds every batch to `seq_length`.
            disable_in_eval: in eval, run transformers' own attention on whole rows.
            deprecated: `max_length`, the old name of `seq_length`.

        Returns:
            What `deepspeed.initialize(mpu=...)` takes; None for size 1.

        Raises:
            ConfigError: a size below 1, a fixed length that is missing, a name or DeepSpeed that cannot be used.
            TopologyError: processes or heads that cannot be divided so, or that differ between processes.
            ModelError: the model uses another attention implementation.

        Cost: process groups, at the first call; on GPUs of one node a quarter of a GiB of each.
        """
        length = _length(seq_length, deprecated)
        _check_call(sequence_parallel_size, micro_batch_size)
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and length is None:
            raise ConfigError("Set seq_length to the tokens of every row, or seq_length_is_variable=True.")
        _check_initialized(sequence_parallel_size)
        config, loaded = _config(model_name_or_path)
        name = _checked_name(core_attn_implementation, config, loaded)
        fixed = None if seq_length_is_variable else length
        identity, settings = identity_of(config), (sequence_parallel_size, fixed, disable_in_eval)
        found = next((each for each in interceptions() if each.name == name), None)
        for registration in found.registrations if found else ():
            if (registration.identity, registration.settings) == (identity, settings):
                return registration.mpu
        heads, kv_heads = head_counts(config)
        mesh = make_mesh(sequence_parallel_size, heads=heads, kv_heads=kv_heads)
        registration = Registration(
            identity, settings, MPU(mesh), _kernel(name), Contexts(mesh, fixed), disable_in_eval
        )
        found = found or Interception(name)
        found.registrations[:] = [each for each in found.registrations if each.identity != identity]
        found.registrations.append(registration)
        return registration.mpu

    @classmethod
    def unregister(cls, core_attn_implementation: str | None = None) -> None:
        """Give transformers its own attention and mask functions back; without a name, all of them."""
        for interception in interceptions():
            if core_attn_implementation in (None, interception.name):
                interception.lift()


def _length(seq_length: int | None, deprecated: dict[str, int | None]) -> int | None:
    unknown = sorted(deprecated.keys() - {"max_length"})
    if unknown:
        raise TypeError(f"register_with_transformers got an unexpected keyword argument '{unknown[0]}'")
    return deprecated.get("max_length") if seq_length is None else seq_length


def _check_call(sequence_parallel_size: Any, micro_batch_size: Any) -> None:
    if "deepspeed" in sys.modules:  # whose engine will take what registration returns
        check_version()
    for name, number in (
        ("sequence_parallel_size", sequence_parallel_size),
        ("micro_batch_size", micro_batch_size),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ConfigError(f"{name} must be an integer of at least 1, got {number!r}.")


def _check_initialized(size: int) -> None:
    if not dist.is_initialized():
        raise TopologyError(
            f"sequence_parallel_size {size} needs {size} processes, but torch.distributed is not initialised: call "
            "deepspeed.init_distributed() or torch.distributed.init_process_group() first."
        )


def _config(model: Any) -> tuple[PreTrainedConfig, bool]:
    """Return the config of a model, and whether it says which attention the model uses."""
    if isinstance(model, PreTrainedConfig):
        return model, model._attn_implementation is not None
    config = getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        return config, True
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        return AutoConfig.from_pretrained(model, trust_remote_code=False), False
    raise ConfigError(f"model_name_or_path must be a name, path, config or model, got {type(model).__name__}.")


def _checked_name(name: str, config: PreTrainedConfig, loaded: bool) -> str:
    """Refuse names of attention implementations that cannot be divided, or that the model does not use."""
    usable = sorted(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "eager" not in key and "paged" not in key)
    choices = f"Use one of {', '.join(usable)}, or a kernel of the Hub (org/name)."
    if not isinstance(name, str):
        raise ConfigError(f"core_attn_implementation must be a name, got {name!r}. {choices}")
    if name.rpartition("|")[2] == "eager":
        raise ConfigError(f"Attention '{name}' needs a mask of all queries by all keys, O(n²) memory. {choices}")
    if name.startswith("paged|"):
        raise ConfigError(f"Attention '{name}' is for generation. {choices}")
    if name not in ALL_ATTENTION_FUNCTIONS and not _HUB.fullmatch(name):
        raise ConfigError(f"There is no attention implementation '{name}'. {choices}")
    used = config._attn_implementation
    if loaded and used is not None and used != name:
        raise ModelError(
            f"The model uses attention implementation '{used}', core_attn_implementation is '{name}', so its attention "
            "would stay undivided: give both the same name."
        )
    return name


def _kernel(name: str) -> str:
    """Return the name under which longspan picks a kernel for an attention implementation."""
    if name == "sdpa" or name.startswith("flash_attention_"):
        return name
    tell(f"longspan: attention '{name}' names the models that are served; longspan picks the kernel")
    return "auto"

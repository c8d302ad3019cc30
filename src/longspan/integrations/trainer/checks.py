"""What a Trainer may be set to, and the nearest setting that works where it may not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from longspan.errors import ConfigError, TopologyError


def chosen_size(trainer: Any, asked: int | None) -> int:
    """Return how many ranks share a sequence: what is asked for, or the context-parallel axis of accelerate's mesh.

    Raises:
        ConfigError: neither says.
        TopologyError: they disagree, or other axes divide the model or the sequence.
    """
    config = trainer.accelerator.parallelism_config
    axis = 1 if config is None else config.cp_size
    if config is not None and config.sp_size > 1:
        raise TopologyError(
            f"ParallelismConfig(sp_size={config.sp_size}) is DeepSpeed's sequence parallelism, in place of longspan's: "
            "leave sp_size out, and with FSDP2 name the axis cp_size."
        )
    if (config is not None and config.tp_size > 1) or (getattr(trainer.model, "_tp_size", None) or 1) > 1:
        raise TopologyError(
            "The model is divided by tensor parallelism, which longspan cannot be combined with: leave tp_size and "
            "tp_plan out, and let FSDP2 divide parameters over all ranks."
        )
    if asked is None and axis == 1:
        raise ConfigError("Say how many ranks share a sequence: enable(trainer, sequence_parallel_size=...).")
    if asked is not None and axis not in (1, asked):
        raise TopologyError(
            f"sequence_parallel_size={asked}, but ParallelismConfig has cp_size={axis}: make them equal, or leave "
            "one of them out."
        )
    return axis if asked is None else asked


def check(trainer: Any, logits: bool) -> None:
    """Refuse settings under which a sequence-parallel Trainer would be wrong, or could not run.

    Raises:
        ConfigError: names the first such setting, and the way out.
    """
    for problem in (*_of_arguments(trainer.args), *_of_engine(trainer), *_of_trainer(trainer), *_of_logits(trainer)):
        needs_logits, text = problem
        if not (needs_logits and logits):
            raise ConfigError(text)


_Problem = tuple[bool, str]


def _of_arguments(args: Any) -> Iterator[_Problem]:
    wrong = {
        "use_liger_kernel": (
            "use_liger_kernel replaces the model's forward when training starts: apply Liger's kernels to the model "
            "before enable, with fused_linear_cross_entropy=False, and leave use_liger_kernel out."
        ),
        "neftune_noise_alpha": "neftune_noise_alpha scales its noise by the length of a rank's part: leave it out.",
        "torch_compile": (
            "torch_compile would compile the exchanges between ranks; longspan compiles its layers' tiles by itself: "
            "leave torch_compile out."
        ),
        "auto_find_batch_size": "auto_find_batch_size starts over with models half prepared: set the batch size.",
        "predict_with_generate": (
            "predict_with_generate needs a KV cache, which a divided sequence has none of: set it to False, and "
            "generate inside `with enabled.bypass():`."
        ),
        "activation_offloading": (
            "activation_offloading would move what longspan moves by itself: leave it out, and pass "
            "enable(..., memory=longspan.Memory(...)) to set what is kept where."
        ),
    }
    for name, text in wrong.items():
        if getattr(args, name, None):
            yield False, text
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        yield False, "train_sampling_strategy='batch_rebalance' divides rows over all ranks: use 'group_by_length'."
    config = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(config, name, None):
            yield False, f"accelerator_config {name}=True divides batches over all ranks: leave it out."
    if args.world_size > 1 and not args.average_tokens_across_devices:
        yield (
            False,
            "average_tokens_across_devices=False weighs tokens by the rank they are on: leave it at True, so that all "
            "tokens weigh the same.",
        )


def _of_engine(trainer: Any) -> Iterator[_Problem]:
    plugin: Any = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_xla_enabled or (trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2):
        yield False, "Only FSDP2 keeps the parameters as longspan needs them: set fsdp_config={'version': 2}."
    if trainer.is_fsdp_enabled and plugin.activation_checkpointing:
        yield False, "FSDP's activation_checkpointing would repeat every exchange between the ranks: leave it out."
    if trainer.args.n_gpu > 1:
        yield (
            False,
            f"One process drives {trainer.args.n_gpu} GPUs through DataParallel: start one process per GPU, "
            "with torchrun or accelerate launch.",
        )
    if trainer.is_model_parallel:
        yield False, "device_map puts the model's layers on several devices: leave it out, and use FSDP2 instead."
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield False, "distributed_config divides the model when it is loaded: leave it out, and use accelerate's FSDP2."


def _of_trainer(trainer: Any) -> Iterator[_Problem]:
    if trainer.model_init is not None:
        yield False, "model_init makes a new model when training starts: pass the model itself."
    names = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    if "SFTTrainer" in names and not hasattr(sys.modules["trl.trainer.utils"], "FusedCausalLMOutput"):
        yield False, "SFTTrainer is of another TRL than longspan knows: pip install 'longspan[trl]'."
    if names and "SFTTrainer" not in names:
        yield (
            False,
            f"longspan enables Trainer and SFTTrainer; {names[0]} computes its loss from log-probabilities: take them "
            "from handle.token_logps, as examples/trl_dpo.py does.",
        )


def _of_logits(trainer: Any) -> Iterator[_Problem]:
    used = {
        "compute_metrics": trainer.compute_metrics,
        "preprocess_logits_for_metrics": trainer.preprocess_logits_for_metrics,
        "compute_loss_func": trainer.compute_loss_func,
        "label_smoothing_factor": trainer.label_smoother,
    }
    for name, value in used.items():
        if value is not None:
            yield (
                True,
                f"{name} needs the logits of all tokens on each rank, which longspan does not make unasked "
                f"({_logit_bytes(trainer)} bytes per token): pass enable(..., logits=True), or leave it out.",
            )


def _logit_bytes(trainer: Any) -> str:
    size = getattr(trainer.model.config.get_text_config(), "vocab_size", 0)
    return f"{4 * size:,}"

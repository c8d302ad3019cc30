"""Tiny models, and what one device computes for them: each document alone, in fp64, by the unprepared model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteSWAConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCABULARY = 37

WINDOW = 7

MIXED_HEADS = "mixed-heads"

Batch = dict[str, Any]


def _sizes(**changed: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return sizes | changed


def _delta(**changed: Any) -> dict[str, Any]:
    """Two gated delta nets of 4 value heads on 2 key heads, or others, and attention."""
    sizes = {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 4,
    }
    return sizes | changed


M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_sizes()),
    "llama-6-heads": lambda: LlamaConfig(**_sizes(num_attention_heads=6, num_key_value_heads=3)),
    "llama-dynamic": lambda: LlamaConfig(
        **_sizes(
            max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        )
    ),
    "two-heads": lambda: LlamaConfig(**_sizes(num_attention_heads=2, num_key_value_heads=2)),
    "llama-tied": lambda: LlamaConfig(**_sizes(tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2Config(**_sizes(num_attention_heads=6, num_key_value_heads=3, head_dim=4)),
    "qwen3": lambda: Qwen3Config(**_sizes(num_attention_heads=5, num_key_value_heads=1, head_dim=8)),
    "mistral": lambda: MistralConfig(**_sizes(sliding_window=None)),
    "phi3": lambda: Phi3Config(
        **_sizes(original_max_position_embeddings=32, max_position_embeddings=128, rope_parameters=LONG_ROPE)
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_sizes(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1)
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **_sizes(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            decoder_sparse_step=2,
            **_delta(),
        )
    ),
    "qwen3.5": lambda: Qwen3_5TextConfig(
        **_sizes(head_dim=8, rope_parameters=M_ROPE, **_delta(linear_num_key_heads=3, linear_num_value_heads=3))
    ),
    "mistral-window": lambda: MistralConfig(**_sizes(sliding_window=WINDOW)),
    "qwen2-window": lambda: Qwen2Config(
        **_sizes(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, head_dim=6)
    ),
    "gemma2": lambda: Gemma2Config(
        **_sizes(
            sliding_window=WINDOW, attn_logit_softcapping=1.5, final_logit_softcapping=None, query_pre_attn_scalar=3
        )
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_sizes(num_hidden_layers=3, sliding_window=WINDOW, layer_types=["sliding_attention"] * 2 + ["full_attention"])
    ),
    "granite-swa": lambda: GraniteSWAConfig(
        **_sizes(num_attention_heads=6, num_key_value_heads=2, attention_multiplier=0.4, sliding_window=WINDOW)
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_sizes(
            num_local_experts=3,
            num_experts_per_tok=2,
            intermediate_size=16,
            sliding_window=WINDOW,
            num_attention_heads=6,
            num_key_value_heads=3,
        )
    ),
    "mixtral": lambda: MixtralConfig(**_sizes(num_local_experts=3, num_experts_per_tok=2, intermediate_size=16)),
}


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, layers: int | None = None) -> Any:
    """Build a model with random weights; biases and norms are random too, so that no gradient is special.

    Args:
        layers: how many it has, of the kinds of its family in turn; None for as many as its family has.
    """
    torch.manual_seed(seed)
    if family == MIXED_HEADS:
        return _mixed_heads(dtype, seed)
    config = FAMILIES[family]()
    count: Any = config.num_hidden_layers if layers is None else layers
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % len(config.layer_types)] for i in range(count)]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager").to(
        dtype
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    slow_decay(model)
    return model.train()


def slow_decay(model: torch.nn.Module) -> None:
    """Let states of gated delta nets live long, so that what leaks through them is seen far away."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-4.0, -2.0, parameter.numel()))


def _mixed_heads(dtype: torch.dtype, seed: int) -> Any:
    """Build a model whose second layer has 6 query and 3 KV heads, where the first has 4 and 2."""
    model, other = build("llama", dtype, seed), build("llama-6-heads", dtype, seed)
    model.model.layers[1] = other.model.layers[1]
    model.model.layers[1].self_attn.config = model.config
    return model


@dataclass(frozen=True)
class Rows:
    """What a batch is made of: for each row the lengths of its documents, and padding up to the longest row.

    Args:
        untargeted: rows without any target.
    """

    documents: Sequence[Sequence[int]]
    untargeted: Sequence[int] = ()
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    def batch(self) -> Batch:
        """Return the full batch: about one label in eight is ignored."""
        make = torch.Generator().manual_seed(self.seed)
        tokens = max(sum(row) for row in self.documents)
        shape = (len(self.documents), tokens)
        ids = torch.randint(1, VOCABULARY, shape, generator=make)
        labels = ids.masked_fill(torch.rand(shape, generator=make) < 0.125, -100)
        positions = torch.zeros(shape, dtype=torch.long)
        mask = torch.ones(shape, dtype=torch.long)
        for i, row in enumerate(self.documents):
            real = sum(row)
            positions[i, :real] = torch.cat([torch.arange(n) for n in row])
            mask[i, real:] = 0
            labels[i, real:] = -100
        for i in self.untargeted:
            labels[i] = -100
        batch: Batch = {"input_ids": ids, "labels": labels, "position_ids": positions, **self.extra}
        return batch if bool(mask.all()) else batch | {"attention_mask": mask}

    def targets(self) -> int:
        """Count the targets, from scratch."""
        return sum(int((labels[1:] != -100).sum()) for _, labels in self.alone())

    def alone(self) -> list[tuple[Tensor, Tensor]]:
        """Return ids and labels of each document by itself."""
        batch = self.batch()
        found = []
        for i, row in enumerate(self.documents):
            start = 0
            for length in row:
                found.append(
                    (batch["input_ids"][i, start : start + length], batch["labels"][i, start : start + length])
                )
                start += length
        return found


class WideMode(TorchFunctionMode):
    """Turns what a model computes in fp32 on purpose into fp64, forward and backward."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def one_device(model: PreTrainedModel, batches: Sequence[Rows]) -> tuple[float, dict[str, Tensor], int]:
    """Return loss, gradients and number of targets of the mean over all targets of these batches."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    targets = sum(rows.targets() for rows in batches)
    total = 0.0
    with WideMode():
        for ids, labels in (document for rows in batches for document in rows.alone()):
            logits = plain(input_ids=ids[None], use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / max(targets, 1)
            loss.backward()
            total += float(loss.detach())
    return total, gradients(plain), targets


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return all gradients, zero where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }

"""What each family of models can do, declared: the matrix proves it, and docs/models.md is written from it.

PYTHONPATH=src:tests/parity python tests/parity/families.py    # writes docs/models.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers as hf

from longspan.check.row import COLUMNS, Cell, row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table: tests/parity/families.py -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Family:
    """A family that is exact, but for the columns that say why not.

    Args:
        overrides: fields of the preset that differ here.
        refused: by column, what the refusal says.
    """

    name: str
    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def cells(self) -> dict[str, Cell]:
        """Return the cells of the family's row."""
        return {c: Cell("refused", self.refused[c]) if c in self.refused else Cell("exact") for c in COLUMNS}


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}

FAMILIES = (
    Family("Llama", "tiny-llama"),
    Family("Qwen2", "tiny-qwen2"),
    Family("Qwen3", "tiny-qwen3"),
    Family("Mistral, windows", "tiny-mistral"),
    Family("Phi-3, LongRoPE", "tiny-phi3"),
    Family("Gemma 2, windows and softcaps", "tiny-gemma2"),
    Family("Gemma 3, five windows to one", "tiny-gemma3"),
    Family("Gemma 4, two head sizes and experts", "tiny-gemma4"),
    Family("Granite, scaled logits", "tiny-granite"),
    Family("Cohere 2, windows and scaled logits", "tiny-cohere2"),
    Family("GPT-OSS, sinks, windows, auxiliary loss", "tiny-gpt-oss", BALANCED),
    Family("Qwen3-MoE, auxiliary loss", "tiny-moe", BALANCED),
    Family("Mixtral, auxiliary loss", "tiny-mixtral", BALANCED),
    Family("OLMoE, auxiliary loss", "tiny-olmoe", BALANCED),
    Family("DeepSeek-V3, latent attention", "tiny-deepseek-v3"),
    Family("Qwen3-Next, gated delta nets, auxiliary loss", "tiny-qwen3-next", BALANCED),
    Family("Qwen3.5, gated delta nets", "tiny-qwen3.5"),
    Family("Qwen2.5-VL, images", "tiny-qwen2.5-vl"),
    Family("Qwen3-VL, images", "tiny-qwen3-vl"),
)
"""Every one is exact in every column; a refusal would be listed with its reason."""


@dataclass(frozen=True)
class Refused:
    """A family that `prepare` refuses, and what it says."""

    config: Callable[[], hf.PreTrainedConfig]
    says: str


_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}

_SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "layer_types": ["full_attention"] * 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 64,
}

_NO_ATTENTION = "never calls the attention interface"

REFUSED: dict[str, Refused] = {
    "Falcon-H1": Refused(
        lambda: hf.FalconH1Config(**dict(_SIZES, **_MAMBA, head_dim=8, mamba_d_ssm=32)),
        "model.layers.0 (FalconH1DecoderLayer) mixes tokens outside its attention",
    ),
    "Gemma 3n": Refused(
        lambda: hf.Gemma3nTextConfig(
            **dict(_SIZES, **_SHARED, intermediate_size=[48] * 4),
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
        ),
        "model.layers.2 (Gemma3nTextDecoderLayer) and all layers after it reuse the keys and values of earlier layers",
    ),
    "Gemma 4 with shared keys (E2B, E4B)": Refused(
        lambda: hf.Gemma4TextConfig(**dict(_SIZES, **_SHARED, global_head_dim=16)),
        "model.layers.2 (Gemma4TextDecoderLayer) and all layers after it reuse the keys and values of earlier layers",
    ),
    "Llama 4": Refused(
        lambda: hf.Llama4TextConfig(
            **_SIZES,
            head_dim=8,
            num_local_experts=2,
            attention_chunk_size=8,
            intermediate_size_mlp=48,
            interleave_moe_layer_step=2,
        ),
        "Llama4TextAttention of layer 0 asks attention for chunks of 8 tokens that do not see each other",
    ),
    "LFM2": Refused(
        lambda: hf.Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"]),
        f"model.layers.0 (Lfm2DecoderLayer) {_NO_ATTENTION}",
    ),
    "Jamba": Refused(
        lambda: hf.JambaConfig(
            **_SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_dt_rank=4, use_mamba_kernels=False
        ),
        f"model.layers.0 (JambaMambaDecoderLayer) {_NO_ATTENTION}",
    ),
    "Mamba 2": Refused(
        lambda: hf.Mamba2Config(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1
        ),
        f"backbone.layers.0 (Mamba2Block) {_NO_ATTENTION}",
    ),
    "Bamba": Refused(
        lambda: hf.BambaConfig(**_SIZES, **dict(_MAMBA, mamba_n_heads=8), attn_layer_indices=[1]),
        f"model.layers.0 (BambaDecoderLayer) {_NO_ATTENTION}",
    ),
    "MiniMax": Refused(
        lambda: hf.MiniMaxConfig(
            **_SIZES, head_dim=8, num_local_experts=2, layer_types=["linear_attention", "full_attention"]
        ),
        f"model.layers.0 (MiniMaxDecoderLayer) {_NO_ATTENTION}",
    ),
}


def rendered(page: str) -> str:
    """Return the page with the tables of what is declared here."""
    head = ["family", "preset", *COLUMNS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [row(family.name, family.preset, family.cells()) for family in FAMILIES]
    lines += ["", "| refused | what `prepare` says |", "|---|---|"]
    lines += [f"| {name} | {refused.says} |" for name, refused in REFUSED.items()]
    before, rest = page.split(BEGIN)
    return "\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{rest.split(END)[1]}"])


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

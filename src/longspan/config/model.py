"""Settings of the model: its weights, its positions, and what is trained of it."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import model_validator

from longspan.config.section import Float, Int, Rate, Section, Size, Texts
from longspan.config.section import field as _field


class RopeConfig(Section):
    """Rotary position embeddings in place of the model's own; they are saved with the model."""

    type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] | None = _field(
        "How frequencies are stretched for positions beyond those of pre-training; null: as the model has it.",
        None,
        example="yarn",
    )
    factor: Float | None = _field(
        "How many times longer than in pre-training sequences can be.", None, example=4.0, gt=1
    )
    original_max_position_embeddings: Size | None = _field(
        "Positions of pre-training; null: what the model's config says.", None, unit="tokens", example="32K", ge=1
    )
    theta: Float | None = _field("Base of the frequencies; null: as the model has it.", None, example=1.0e6, gt=0)
    options: dict[str, Any] = _field(
        "Further parameters of the type, by their names in transformers' rope_parameters.",
        {},
        example="{beta_fast: 32, beta_slow: 1}",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type in ("linear", "dynamic", "yarn", "llama3", "longrope") and self.factor is None:
            raise ValueError(f"type {self.type} needs a factor, such as 4 for sequences four times as long")
        for name in ("factor", "original_max_position_embeddings", "options"):
            if getattr(self, name) and self.type in (None, "default"):
                raise ValueError(f"{name} needs a type that stretches, such as type: yarn; theta alone needs none")
        if self.original_max_position_embeddings and self.type == "dynamic":
            raise ValueError(
                "type dynamic stretches beyond the config's max_position_embeddings: set that by model.overrides, and "
                "leave original_max_position_embeddings out"
            )
        return self

    @property
    def given(self) -> bool:
        """Whether anything is to be replaced."""
        return self.type is not None or self.theta is not None


class ModelConfig(Section):
    """The model to train."""

    name: str = _field(
        "Model: a preset (random weights, nothing downloaded), a folder, or a hub id.",
        example="tiny-llama",
        min_length=1,
    )
    init: Literal["pretrained", "random"] = _field(
        "Weights: 'pretrained' loads them, 'random' draws them from the seed.", "pretrained", example="random"
    )
    overrides: dict[str, Any] = _field(
        "Fields of the model's own config to replace, whole numbers also as 128K; they are saved with the model.",
        {},
        example="{num_hidden_layers: 2}",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = _field(
        "Type of the parameters, their gradients and the optimizer's state.", "float32", example="bfloat16"
    )
    quantization: Literal["none", "nf4", "int8"] = _field(
        "Pack the weights of the layers' linear modules, for training adapters: 'nf4' into 4 bits (bitsandbytes), "
        "'int8' into 8 (torchao).",
        "none",
        example="nf4",
    )
    rope: RopeConfig = RopeConfig()


class AdapterConfig(Section):
    """Adapters of PEFT to train in place of the model's own weights."""

    kind: Literal["none", "lora"] = _field("'lora': low-rank updates beside linear modules.", "none", example="lora")
    rank: Int = _field("Rank of the updates.", 16, example=16, ge=1)
    alpha: Float = _field("Updates are scaled by alpha / rank.", 32.0, example=32, gt=0)
    dropout: Rate = _field("Share of an adapter's inputs that is dropped, from 0 to below 1.", 0.0, example=0.05)
    target_modules: Texts = _field(
        "Modules that get an adapter, by the ends of their names; 'all-linear': all linear modules but the head.",
        ("all-linear",),
        example="[q_proj, v_proj]",
        min_length=1,
    )
    modules_to_save: Texts = _field(
        "Further modules that are trained whole, and saved with the adapter.", (), example="[lm_head]"
    )
    dtype: Literal["float32", "bfloat16", "float64"] | None = _field(
        "Type of the adapters; null: model.dtype.", None, example="float32"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "none":
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.default:
                    raise ValueError(f"{name} is set, but kind is none: set kind: lora, or leave {name} out")
        return self

"""Rotary tables of a part: those of the whole batch, and exact where fp32 is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from longspan.errors import ModelError
from longspan.integrations.transformers.rope import EXACT_FLOAT32_POSITIONS, Rotary, rotary_kinds

FAR = 9_999_990
X = torch.zeros(1, 4, 8)


def under(largest: int | None) -> Any:
    """Stand for a prepared model in a forward pass of a batch that reaches `largest`, or outside of one."""
    call = None if largest is None else SimpleNamespace(shard=SimpleNamespace(max_position=largest))
    return SimpleNamespace(call=call)


class Kinds(nn.Module):
    """One table per kind of layer, as models with several have it."""

    def __init__(self) -> None:
        super().__init__()
        for kind, base in (("full_attention", 1e4), ("sliding_attention", 1e2)):
            self.register_buffer(f"{kind}_inv_freq", base ** -(torch.arange(0, 8, 2) / 8))
            self.register_buffer(f"{kind}_original_inv_freq", torch.zeros(4))
            setattr(self, f"{kind}_attention_scaling", 1.5 if kind == "full_attention" else 1.0)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * getattr(self, f"{layer_type}_inv_freq")
        angles = torch.cat([angles, angles], -1)
        scaling = getattr(self, f"{layer_type}_attention_scaling")
        return angles.cos() * scaling, angles.sin() * scaling


class ScaledByLength(nn.Module):
    """Scales long sequences by a number of its own, as PhiMoE does."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, 8, 2) / 8))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        scale = 1.25 if int(position_ids.max()) > 4096 else 1.0
        return torch.cat([angles, angles], -1).cos() * scale, torch.cat([angles, angles], -1).sin() * scale


def llama(**rope: Any) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            head_dim=8,
            max_position_embeddings=64,
            rope_parameters={"rope_theta": 1e4, "rope_type": "default", **rope},
        )
    )


def exact(inv_freq: Tensor, positions: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    angles = positions[..., None].double() * inv_freq.double()
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * scaling, angles.sin() * scaling


def error(found: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, true, strict=True))


def axial(family: str) -> tuple[Any, list[int]]:
    """Return a rotary embedding of images, and the axis of each of its frequencies."""
    rope: dict[str, Any] = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [2, 1, 1]}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    if family == "qwen3_vl":
        text: Any = Qwen3VLTextConfig(**sizes, head_dim=8, rope_parameters=rope | {"mrope_interleaved": True})
        return Qwen3VLTextRotaryEmbedding(text), [0, 1, 2, 0]
    return Qwen2_5_VLRotaryEmbedding(Qwen2_5_VLTextConfig(**sizes, rope_parameters=rope)), [0, 0, 1, 2]  # type: ignore


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_along_three_axes(family: str) -> None:
    """Near ones have the module's own bits, far ones are exact along each axis."""
    module, axes = axial(family)
    near = torch.tensor([[0, 3, 4, 9], [0, 5, 1, 9], [0, 2, 7, 9]])[:, None]
    assert error(Rotary(module, under(9))(X, near), module.forward(X, near)) == 0.0
    far = near + torch.tensor([FAR, 40_000, 7])[:, None, None]
    rotary = Rotary(module, under(FAR + 9))
    assert rotary.axes is not None
    assert rotary.axes.tolist() == axes
    angles = far.permute(1, 2, 0)[..., axes].double() * module.inv_freq.double()
    angles = torch.cat([angles, angles], -1)
    assert error(rotary(X, far), (angles.cos(), angles.sin())) < 1e-7
    assert error(module.forward(X, far), (angles.cos(), angles.sin())) > 1e-4


def test_outside_of_a_forward_pass_it_is_the_module_itself() -> None:
    module = llama()
    positions = torch.arange(FAR, FAR + 4)[None]
    own = module.forward(X, positions)
    assert error(Rotary(module, under(None))(X, positions), own) == 0.0


@pytest.mark.parametrize("first", [0, EXACT_FLOAT32_POSITIONS - 4])
def test_near_positions_have_the_modules_own_bits(first: int) -> None:
    module = llama()
    positions = torch.arange(first, first + 4)[None]
    assert error(Rotary(module, under(first + 3))(X, positions), module.forward(X, positions)) == 0.0


@pytest.mark.parametrize("first", [0, EXACT_FLOAT32_POSITIONS, FAR])
def test_in_a_batch_that_reaches_far_all_angles_are_exact(first: int) -> None:
    module = llama()
    positions = torch.arange(first, first + 4)[None]
    found = Rotary(module, under(FAR + 3))(X, positions)
    assert error(found, exact(module.inv_freq, positions)) < 1e-7  # type: ignore[arg-type]


def test_in_float32_far_angles_are_lost() -> None:
    """The reason for all this."""
    module = llama()
    positions = torch.arange(FAR, FAR + 4)[None]
    assert error(module.forward(X, positions), exact(module.inv_freq, positions)) > 1e-2  # type: ignore[arg-type]


@pytest.mark.parametrize("largest", [40, 63, 64, 200, 1000])
def test_tables_that_adapt_to_the_length_go_by_the_whole_batch(largest: int) -> None:
    """A part near the start must not take the frequencies of a short sequence, nor the module remember a long one."""
    module, single = llama(rope_type="dynamic", factor=2.0), llama(rope_type="dynamic", factor=2.0)
    rotary = Rotary(module, under(largest))
    whole = single.forward(X, torch.arange(largest + 1)[None])
    part = rotary(X, torch.arange(4)[None])
    assert error(part, (whole[0][:, :4], whole[1][:, :4])) == 0.0


def test_what_is_tried_at_the_start_leaves_no_trace() -> None:
    module, untouched = llama(rope_type="dynamic", factor=2.0), llama(rope_type="dynamic", factor=2.0)
    Rotary(module, under(None))
    assert module.max_seq_len_cached == untouched.max_seq_len_cached
    for name in ("inv_freq", "original_inv_freq"):
        assert torch.equal(getattr(module, name), getattr(untouched, name))


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("by_name", [True, False])
def test_each_kind_of_layer_has_its_own_table(kind: str, by_name: bool) -> None:
    module = Kinds()
    assert rotary_kinds(module) == ("full_attention_", "sliding_attention_")
    positions = torch.arange(FAR, FAR + 4)[None]
    rotary = Rotary(module, under(FAR + 3))
    found = rotary(X, positions, layer_type=kind) if by_name else rotary(X, positions, kind)
    scaling = getattr(module, f"{kind}_attention_scaling")
    assert error(found, exact(getattr(module, f"{kind}_inv_freq"), positions, scaling)) < 1e-6
    near = torch.arange(4)[None]
    assert error(Rotary(module, under(3))(X, near, layer_type=kind), module(X, near, kind)) == 0.0


def test_angles_that_are_not_understood_are_refused_where_they_would_be_wrong() -> None:
    module = ScaledByLength()
    rotary = Rotary(module, under(20_000))
    positions = torch.arange(4)[None]
    whole = module.forward(X, torch.tensor([[0, 1, 2, 3, 20_000]]))
    assert error(rotary(X, positions), (whole[0][:, :4], whole[1][:, :4])) == 0.0
    with pytest.raises(ModelError, match=f"ScaledByLength .* beyond position 32768; this batch reaches {FAR}"):
        Rotary(module, under(FAR))(X, positions)


def test_a_module_without_frequencies_is_none_of_ours() -> None:
    assert rotary_kinds(nn.Linear(2, 2)) == ()
    assert rotary_kinds(llama()) == ("",)

"""Where a model with a vision tower has its text trunk, and what its code has to do with images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from longspan.errors import ModelError

_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Model types whose code is known; the tower and the trunk of others are not taken apart."""


@dataclass(frozen=True)
class Sight:
    """What a model's code has to do with images.

    Args:
        owner: the module that joins the vision tower and the text trunk, and knows M-RoPE's positions.
        tower: turns patches into feature rows.
        tokens: ids of the tokens that stand for a feature row of an image, and of a video.
        merge: patches along height, and along width, that make one feature row.
        width: numbers of a patch.
        stacked: layers after which features are added to hidden states (DeepStack).
        times: whether text between the frames of a video tells their times.
    """

    owner: nn.Module
    tower: nn.Module
    tokens: tuple[int, int]
    merge: int
    width: int
    stacked: int
    times: bool


def text_trunk(model: Any) -> tuple[Any, str]:
    """Return the part of a model that holds its decoder layers, and its name."""
    name = model.base_model_prefix
    if model.config.model_type in _FAMILIES:
        return model.base_model.language_model, f"{name}.language_model"
    return model.base_model, name


def decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Return a model's list of decoder layers, and its name in the text trunk.

    Raises:
        ModelError: there is none that can be found.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for name, module in text_trunk(model)[0].named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ModelError(f"{type(model).__name__} has no list of {count} decoder layers that longspan can find.")


def text_vocabulary(config: Any) -> int:
    """Return how many token ids, from 0 on, stand for text."""
    size = config.get_text_config().vocab_size
    return min(size, config.image_token_id, config.video_token_id) if config.model_type in _FAMILIES else size


def sight_of(model: Any) -> Sight | None:
    """Return what a model's code has to do with images, if it is of a family whose code is known."""
    config = model.config
    if config.model_type not in _FAMILIES:
        return None
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    return Sight(
        owner=model.base_model,
        tower=model.base_model.visual,
        tokens=(config.image_token_id, config.video_token_id),
        merge=vision.spatial_merge_size,
        width=channels * vision.temporal_patch_size * vision.patch_size**2,
        stacked=len(getattr(vision, "deepstack_visual_indexes", ())),
        times=config.model_type == "qwen3_vl",
    )

"""The parts of a Hugging Face causal language model that longspan touches, found by structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.errors import ModelError
from longspan.integrations.multimodal import Sight, decoder_layers, sight_of, text_trunk
from longspan.integrations.transformers.norm import final_norm
from longspan.integrations.transformers.rope import rotary_kinds

_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "DeepSpeedEngine": "deepspeed.initialize",
    "OptimizedModule": "torch.compile",
}


@dataclass(frozen=True)
class Parts:
    """Model, text trunk, decoder layers, head, input embedding, rotary embeddings, final norm and vision tower."""

    model: PreTrainedModel
    trunk: PreTrainedModel
    layers: nn.ModuleList
    layers_name: str
    head: nn.Module
    embedding: nn.Module
    rotaries: tuple[nn.Module, ...]
    norm: nn.Module | None  # what follows the layers, if it is found
    sight: Sight | None = None  # of models with a vision tower
    destination: torch.device | None = None  # of a model on the meta device

    @property
    def device(self) -> torch.device:
        """Device of the input embedding, or where it will be."""
        device: Any = self.embedding.weight.device
        return self.destination if device.type == "meta" and self.destination is not None else device

    @property
    def blank(self) -> bool:
        """Whether weights are yet to come."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    @property
    def blocks(self) -> list[nn.Module]:
        """What runs one after the other, see `blocks_of`."""
        return blocks_of(self.model)

    @property
    def checkpointing(self) -> bool:
        """Whether transformers' gradient checkpointing is switched on."""
        return any(getattr(module, "gradient_checkpointing", False) for module in (self.trunk, *self.layers))

    @classmethod
    def of(cls, model: nn.Module, device: torch.device | None = None) -> Parts:
        """Find the parts.

        Args:
            model: a transformers model with a language-modelling head, bare or inside PEFT.
            device: where it will be, if its weights are on the meta device.

        Raises:
            ModelError: it is something else, or wrapped already.
        """
        found = unwrap(model, device)
        head, embedding = found.get_output_embeddings(), found.get_input_embeddings()
        if head is None or embedding is None:
            raise ModelError(
                f"{type(found).__name__} has no language-modelling head; longspan trains causal language models, "
                "such as those of AutoModelForCausalLM."
            )
        trunk, prefix = text_trunk(found)
        name, layers = decoder_layers(found)
        rotaries = tuple(module for module in trunk.modules() if rotary_kinds(module))
        weight: Any = embedding.weight
        place = device if weight.is_meta and device is not None else weight.device
        if device is not None and (place != device or device.type == "meta"):
            raise ModelError(
                f"device={device} is to name where the weights of a model on the meta device will be; this one is on "
                f"{place}. Leave it out for a model that has weights."
            )
        norm = final_norm(trunk.get_submodule(name.rpartition(".")[0]), weight, place)
        return cls(found, trunk, layers, f"{prefix}.{name}", head, embedding, rotaries, norm, sight_of(found), device)


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, after those of a vision tower.

    Raises:
        ModelError: they cannot be found.
    """
    sight = sight_of(model)
    return [*(() if sight is None else cast(Any, sight.tower).blocks), *decoder_layers(model)[1]]


def unwrap(model: nn.Module, device: torch.device | None) -> PreTrainedModel:
    """Return the transformers model inside PEFT, and refuse models that an engine has wrapped.

    Args:
        device: where weights that are on the meta device will be.

    Raises:
        ModelError: not a transformers model, wrapped by an engine before `prepare`, or without weights.
    """
    for kind in type(model).__mro__:
        name = _WRAPPERS.get(kind.__name__) or ("fully_shard" if kind.__name__ == "FSDPModule" else None)
        if name is not None:
            raise ModelError(
                f"The model is already wrapped by {name}. Call longspan.prepare first (after PEFT), then {name}."
            )
    inner: Any = model
    if not isinstance(inner, PreTrainedModel) and hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            f"longspan prepares transformers models, got {type(model).__name__}; for other models use longspan.attend."
        )
    if any(type(module).__name__.startswith("FSDP") for module in inner.modules()):
        raise ModelError(
            "Parts of the model are sharded by fully_shard. Call longspan.prepare first, then fully_shard."
        )
    if any(hasattr(p, "ds_id") for p in inner.parameters()):
        raise ModelError(
            "The model's parameters belong to DeepSpeed. Call longspan.prepare before deepspeed.initialize."
        )
    if device is None and any(p.is_meta for p in inner.parameters()):
        raise ModelError(
            "The model has parameters on the meta device; give it weights before longspan.prepare, or name the device "
            "where they will come to: prepare(..., device=...)."
        )
    if empty := [name for name, buffer in inner.named_buffers() if buffer.is_meta]:
        raise ModelError(
            f"The model's buffers, such as {empty[0]}, are on the meta device, so that nothing can be computed: let "
            "longspan.engines.Origin bring them before longspan.prepare."
        )
    return inner

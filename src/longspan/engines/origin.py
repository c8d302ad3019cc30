"""A model whose weights the first process holds, until each part of it comes to the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.agreement import Agreement
from longspan.errors import ModelError
from longspan.once import is_first

_SAME_MODEL = Agreement(
    "take the first process's weights",
    'Build the same model on all of them, the first on the CPU, the others under torch.device("meta").',
)

_Place = tuple[nn.Module, str]
_Kind = tuple[torch.Size, torch.dtype, bool]


class Origin:
    """Take the weights out of a model, and bring them to all processes, part by part.

    The first process has built the model on the CPU, the others have under `torch.device("meta")`, where tensors have
    no memory. All create this, after adapters are put in. Parameters are on the meta device then, on all processes, and
    buffers, which are small, have the first one's values. What is tied on the first process is tied on all.

    Args:
        device: of this process: buffers come to it at once, parameters with `bring`.

    Raises:
        ModelError: a process has built another model than the first, or weights are packed; on all processes.

    Cost: a broadcast of names, shapes and buffers.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        places = {name: (owner, key) for name, owner, key, _ in _slots(model)}
        values = {name: parameter for name, _, _, parameter in _slots(model)}
        tensors, (names, kinds, others) = dict(_others(model)), from_first(_table(model))
        shapes = {name: kinds[index][0] for name, index in names.items()}
        _SAME_MODEL(lambda: _check_same(values, shapes, tensors, others))
        blanks = [nn.Parameter(torch.empty(s, dtype=t, device="meta"), requires_grad=r) for s, t, r in kinds]
        self._blanks = blanks  # alive, so that no other parameter gets the id of one
        self._places: dict[int, list[_Place]] = {id(blank): [] for blank in blanks}
        self._values: dict[int, Tensor] = {}
        for name, index in names.items():
            owner, key = places[name]
            setattr(owner, key, blanks[index])
            self._places[id(blanks[index])].append((owner, key))
            if is_first():
                self._values[id(blanks[index])] = values[name].detach()
        for name, (owner, key, is_buffer) in tensors.items():
            setattr(owner, key, others[name].to(device) if is_buffer else others[name])

    def bring(self, module: nn.Module) -> None:
        """Give a part of the model its weights, on all processes. Collective.

        What has come already stays as it is. Weights come in the type that the model has by now, and frozen if it is.

        Cost: a broadcast of each parameter. Besides the part itself, no process holds more than one parameter more.
        """
        for blank in list(module.parameters()):
            places = self._places.pop(id(blank), None)
            if places is None:
                continue
            value = self._values.pop(id(blank), None)
            if value is None:
                whole = torch.empty(blank.shape, dtype=blank.dtype, device=self._device)
            else:
                whole = value.to(self._device, blank.dtype).contiguous()
            if dist.is_initialized() and whole.numel():
                dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # no backend knows every dtype, all know bytes
            parameter = nn.Parameter(whole, requires_grad=blank.requires_grad)
            for owner, key in places:
                setattr(owner, key, parameter)


def from_first(value: Any) -> Any:
    """Return what the first process has given. Collective; others get a copy, pickled in between."""
    if not dist.is_initialized():
        return value
    shared = [value if is_first() else None]
    dist.broadcast_object_list(shared, 0)
    return value if is_first() else shared[0]


def _slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield each place that a parameter has in a model: its name, the module and the name there, the parameter."""
    for prefix, owner in model.named_modules():
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{key}", owner, key, parameter


def _others(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, bool]]]:
    """Yield the tensors of a model that are no parameters: their names, places, and whether they are buffers."""
    for prefix, owner in model.named_modules():
        for key, _ in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{key}", (owner, key, True)
        for key, value in vars(owner).items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{key}", (owner, key, False)


def _table(model: nn.Module) -> tuple[dict[str, int], list[_Kind], dict[str, Tensor]]:
    """Return which parameter each name stands for, what each parameter is like, and all other tensors."""
    indices: dict[int, int] = {}
    names, kinds = {}, []
    for name, _, _, parameter in _slots(model):
        if id(parameter) not in indices:
            indices[id(parameter)] = len(kinds)
            kinds.append((parameter.shape, parameter.dtype, parameter.requires_grad))
        names[name] = indices[id(parameter)]
    return names, kinds, {name: getattr(owner, key) for name, (owner, key, _) in _others(model)}


def _check_same(
    values: dict[str, nn.Parameter], shapes: dict[str, torch.Size], own: dict[str, Any], others: dict[str, Tensor]
) -> None:
    """Raise if this process's model is not the first one's, or weights cannot be brought.

    Raises:
        ModelError: what of it.
    """
    if unlike := (values.keys() ^ shapes.keys()) | (own.keys() ^ others.keys()):
        raise ModelError(f"{min(unlike).removeprefix('.')} is in one of the models only.")
    for name, value in values.items():
        short = name.removeprefix(".")
        if type(value.detach()) is not Tensor:
            raise ModelError(f"{short} is packed ({type(value).__name__}); build it whole on every process.")
        if value.shape != shapes[name]:
            raise ModelError(f"{short} is {list(value.shape)} here and {list(shapes[name])} on the first.")

"""Models with a vision tower: their images are divided over the ranks of a sequence, their tokens as ever."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longspan.batch import CONTEXT, Shard, shard_batch
from longspan.errors import BatchError
from longspan.images import Route, Tie
from longspan.integrations.multimodal import Sight
from longspan.integrations.transformers.pictures import FIELDS, KINDS, Pictures
from longspan.mesh import Mesh

if TYPE_CHECKING:
    from longspan.integrations.transformers.applied import Applied

_PIXELS, _GRID = KINDS[0]


class Seen:
    """What the tower made for the tokens of this rank, for one forward pass.

    Args:
        zero: what the hidden states must depend on, so that backward reaches the tower on every rank.
        outputs: answers to the model's questions for features of images and of videos.
    """

    def __init__(self, zero: Tensor, outputs: Mapping[str, Any]) -> None:
        self.zero, self.outputs = zero, outputs


class Vision:
    """Divides a batch with images, and runs the tower once per forward pass on every rank.

    A rank without images looks at one that no token stands for: engines that gather the tower's parameters, or wait
    for their gradients, find every rank there. With one process there is nobody to wait.
    """

    def __init__(self, sight: Sight, applied: Applied) -> None:
        self.sight, self.applied = sight, applied
        self.look_at: Any = sight.owner.get_image_features

    def stand_ins(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Return the attributes that must be replaced, by module."""
        answers = {
            name: _Features(getattr(self.sight.owner, name), values, self.applied)
            for name, (values, _) in zip(("get_image_features", "get_video_features"), KINDS, strict=True)
        }
        embedding = self.applied.parts.embedding
        return [(self.sight.owner, answers), (embedding, {"forward": _TiedEmbedding(embedding, self.applied)})]

    def shard(self, batch: Mapping[str, Any], mesh: Mesh, **options: Any) -> dict[str, Any]:
        """Cut a full batch into the part of this rank: its tokens, and its images.

        Raises:
            BatchError: as `shard_batch`, and for images that do not fit the tokens.
        """
        pictures = Pictures.of(batch, self.sight)
        text = {name: value for name, value in batch.items() if name not in FIELDS}
        if len(pictures.frames.grids):
            given = batch.get("position_ids")
            if given is None:
                text["position_ids"] = pictures.positions(batch)
            elif not isinstance(given, Tensor) or given.dim() != 3:
                raise BatchError(
                    "position_ids of rows with images must be [3, B, S], or [4, B, S] with those of text in front: "
                    "[B, S] has no height and width. To say where documents begin, pass cu_seqlens and leave them out."
                )
        part = shard_batch(text, mesh, axes=True, **options)
        shard: Shard = part[CONTEXT]
        rank = mesh.sequence.rank
        route = Route.of(pictures.places(), pictures.image_rows, pictures.frames, shard.layout, rank)
        part[CONTEXT] = replace(shard, route=route)
        if route.frames or mesh.world.size > 1:
            part[_PIXELS], part[_GRID] = _share(pictures, route.frames)
        return part

    def see(self, shard: Shard, kwargs: dict[str, Any]) -> Seen | None:
        """Run the tower on this rank's images, and bring features to their tokens; `kwargs` are then for the model.

        Cost: see `Route.deliver`.
        """
        pixels, grid = kwargs.pop(_PIXELS, None), kwargs.pop(_GRID, None)
        route = shard.route
        if pixels is None or grid is None or route is None:
            return None
        trained = any(p.requires_grad for p in self.sight.tower.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            out = self.look_at(pixels, grid, return_dict=True)
            levels = [out.pooler_output, *getattr(out, "deepstack_features", ())]
            features = torch.cat([_joined(level) for level in levels], -1)
            rows, zero = route.deliver(features, shard.mesh.sequence)
        outputs = {}
        for (name, _), own in zip(KINDS, (rows[: route.images], rows[route.images :]), strict=True):
            if len(own):
                outputs[name] = _answer(out, own.chunk(len(levels), -1))
                kwargs[name] = own  # the model asks for features where it is given patches
        return Seen(zero, outputs)


class _Features:
    """Stands in for the method of a model that returns features of images, or of videos."""

    def __init__(self, original: Any, values: str, applied: Applied) -> None:
        self.original, self.values, self.applied = original, values, applied
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.applied.call
        if call is None:
            return self.original(*args, **kwargs)
        assert call.seen is not None
        return call.seen.outputs[self.values]


class _TiedEmbedding:
    """Stands in for the `forward` of the input embedding: hidden states depend on the tower on every rank."""

    def __init__(self, module: nn.Module, applied: Applied) -> None:
        self.original, self.applied = module.forward, applied
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.original(*args, **kwargs)
        call = self.applied.call
        return out if call is None or call.seen is None else Tie.apply(out, call.seen.zero)  # type: ignore[return-value]


def _share(pictures: Pictures, frames: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the patches and grids of these frames; those of one that stands for nothing if there are none."""
    merge, grids = pictures.sight.merge, pictures.frames.grids
    if not frames:
        return pictures.pixels.new_zeros(merge**2, pictures.sight.width), torch.tensor([[1, merge, merge]])
    parts = pictures.pixels.split(pictures.frames.patches.tolist())
    grid = torch.cat([torch.ones(len(frames), 1, dtype=torch.long), grids[list(frames)]], 1)
    return torch.cat([parts[frame] for frame in frames]), grid


def _joined(level: Any) -> Tensor:
    """Return feature rows [n, d], which models return image by image, or at once."""
    return level if isinstance(level, Tensor) else torch.cat(tuple(level))


def _answer(out: Any, levels: tuple[Tensor, ...]) -> Any:
    """Return other feature rows in the form of a model's own output."""
    fields: dict[str, Any] = {"pooler_output": (levels[0],)}
    if len(levels) > 1:
        own = zip(out.deepstack_features, levels[1:], strict=True)
        fields["deepstack_features"] = [rows if isinstance(level, Tensor) else (rows,) for level, rows in own]
    return type(out)(**fields)

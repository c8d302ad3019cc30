"""The images and videos of a full batch: what it says about them, checked, and the positions of tokens around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longspan.documents import Documents
from longspan.errors import BatchError
from longspan.images import Frames
from longspan.integrations.multimodal import Sight

KINDS = ("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")
"""Names of patches [n, width], and of patches per image (frames, height, width) [m, 3]: of images, and of videos."""

TYPES = "mm_token_type_ids"
SECONDS = "second_per_grid_ts"
FIELDS = frozenset({*KINDS[0], *KINDS[1], TYPES, SECONDS})
"""Fields of a full batch that are about images."""


@dataclass(frozen=True)
class Pictures:
    """Images and videos of a full batch.

    Args:
        ids: [B, S] tokens, on the host.
        pixels: [n, width] patches of images, then those of videos.
        grids: (frames, height, width) of images [m, 3], and of videos, on the host.
    """

    sight: Sight
    ids: Tensor
    pixels: Tensor
    grids: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, batch: Mapping[str, Any], sight: Sight) -> Pictures:
        """Read a batch.

        Raises:
            BatchError: fields that are missing or do not fit together or the tokens.

        Cost: one copy of the tokens to the host if they live on a GPU.
        """
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise BatchError("A model with a vision tower needs input_ids [B, S]: they say where its images are.")
        ids = ids.to("cpu", torch.long)
        pixels, grids = [], []
        for (values, grid), token in zip(KINDS, sight.tokens, strict=True):
            patches, shapes = _kind(batch, values, grid, sight)
            rows = int(shapes.prod(1).sum()) // sight.merge**2
            found = int((ids == token).sum())
            if found != rows:
                raise BatchError(
                    f"input_ids has {found} tokens {token}, which stand for {values}, but {grid} makes {rows} feature "
                    "rows: give tokens and images of the same documents, whole."
                )
            pixels += [] if patches is None else [patches]
            grids.append(shapes)
        return cls(sight, ids, torch.cat(pixels) if pixels else torch.zeros(0, sight.width), (grids[0], grids[1]))

    @cached_property
    def frames(self) -> Frames:
        """Images, then frames of videos."""
        return Frames.of(self.grids, self.sight.merge)

    @property
    def image_rows(self) -> int:
        """Feature rows of images."""
        return int(self._rows(0).sum())

    def places(self) -> Tensor:
        """Return the feature row that each token stands for, [B, S]; -1 for text."""
        places, count = torch.full_like(self.ids, -1), 0
        for token in self.sight.tokens:
            here = self.ids == token
            found = int(here.sum())
            places[here] = torch.arange(count, count + found)
            count += found
        return places

    def positions(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the position ids [3, B, S] that the model's own code gives to each document by itself.

        Raises:
            BatchError: no mm_token_type_ids, a border inside an image, or images without text in between.
        """
        types = self._types(batch.get(TYPES))
        rows, tokens = self.ids.shape
        documents = Documents.find(batch, rows, tokens)
        positions = torch.arange(tokens).expand(3, rows, -1).clone()
        done = [0, 0]
        for row in range(rows):
            length = tokens if documents.lengths is None else documents.lengths[row]
            starts = (0,) if documents.starts is None else documents.starts[row]
            starts = tuple(start for start in starts if start < length)
            for start, stop in zip(starts, (*starts[1:], length), strict=True):
                at = slice(start, stop)
                grids = [
                    self._take(kind, done, types[row, at], f"Row {row}, tokens {start} to {stop}") for kind in (0, 1)
                ]
                positions[:, row, at] = self._document(row, at, types, grids, batch)
            positions[:, row, length:] = positions[:, row, length - 1 : length]
        if done != [len(grids) for grids in self.grids]:
            raise BatchError(
                f"{len(self.grids[0]) + len(self.grids[1]) - sum(done)} images have their tokens on padding."
            )
        return positions

    def _rows(self, kind: int) -> Tensor:
        return self.grids[kind].prod(1) // self.sight.merge**2

    def _types(self, types: Any) -> Tensor:
        """Return the kind of each token, 0 for text, and check it against the tokens."""
        if types is None:
            raise BatchError(
                f"{TYPES} is missing: positions of images along time, height and width are made from it. The processor "
                "returns it beside input_ids; or pass position_ids [3, B, S]."
            )
        image, video = (self.ids == token for token in self.sight.tokens)
        wanted = image.long() + 2 * video.long()
        if not isinstance(types, Tensor) or not torch.equal(types.to("cpu", torch.long), wanted):
            raise BatchError(
                f"{TYPES} must be [{self.ids.shape[0]}, {self.ids.shape[1]}] with 1 for tokens {self.sight.tokens[0]} "
                f"of images, 2 for tokens {self.sight.tokens[1]} of videos and 0 elsewhere; it has something else."
            )
        return wanted

    def _take(self, kind: int, done: list[int], types: Tensor, where: str) -> slice:
        """Return which images are a document's, the next ones that its tokens stand for."""
        wanted, first = int((types == kind + 1).sum()), done[kind]
        counts = self._rows(kind)[first:].cumsum(0)
        taken = int((counts <= wanted).sum()) if wanted else 0
        if wanted and (taken == 0 or int(counts[taken - 1]) != wanted):
            raise BatchError(f"{where}: the document ends inside an image, whose tokens must all be in one document.")
        done[kind] += taken
        return slice(first, done[kind])

    def _document(self, row: int, at: slice, types: Tensor, grids: list[slice], batch: Mapping[str, Any]) -> Tensor:
        """Return the position ids of one document, [3, tokens]."""
        if all(own.start == own.stop for own in grids):
            return torch.arange(at.stop - at.start).expand(3, -1)
        images, videos = (g[own] if own.start < own.stop else None for g, own in zip(self.grids, grids, strict=True))
        options: dict[str, Any] = {"image_grid_thw": images, "video_grid_thw": videos}
        if batch.get(SECONDS) is not None:
            options[SECONDS] = batch[SECONDS][grids[1]]
        owner: Any = self.sight.owner
        try:
            ids, _ = owner.get_rope_index(
                self.ids[row : row + 1, at], mm_token_type_ids=types[row : row + 1, at], **options
            )
        except (RuntimeError, ValueError, TypeError, IndexError, StopIteration) as error:
            raise BatchError(
                f"Row {row}, tokens {at.start} to {at.stop}: {type(owner).__name__} finds no positions for the images "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}). Each image must be one "
                "run of its tokens, with other tokens in between."
            ) from error
        return ids[:, 0]


def _kind(batch: Mapping[str, Any], values: str, grid: str, sight: Sight) -> tuple[Tensor | None, Tensor]:
    """Return the patches of images or videos, and their grids on the host."""
    patches, shapes = batch.get(values), batch.get(grid)
    if patches is None and shapes is None:
        return None, torch.empty(0, 3, dtype=torch.long)
    if not isinstance(patches, Tensor) or not isinstance(shapes, Tensor):
        raise BatchError(f"{values} and {grid} describe the same images: pass both as tensors, or neither.")
    merge = sight.merge
    shapes = shapes.to("cpu", torch.long)
    if (
        shapes.dim() != 2
        or shapes.shape[1] != 3
        or not len(shapes)
        or int(shapes.min()) < 1
        or (shapes[:, 1:] % merge).any()
    ):
        raise BatchError(
            f"{grid} must be [n, 3]: frames, and patches along height and width in multiples of {merge}; got "
            f"{shapes.tolist() if shapes.numel() < 16 else list(shapes.shape)}."
        )
    count = int(shapes.prod(1).sum())
    if tuple(patches.shape) != (count, sight.width):
        raise BatchError(
            f"{values} must be [{count}, {sight.width}], the patches that {grid} counts by the numbers of one, got "
            f"{list(patches.shape)}."
        )
    return patches, shapes

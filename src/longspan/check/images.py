"""Samples with images: patches in documents that are long enough, as a processor would give them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspan.check.samples import IGNORED, Document, Sample
from longspan.integrations.multimodal import Sight

_ITEMS: tuple[tuple[int, int, int], ...] = ((1, 2, 3), (1, 1, 2), (2, 1, 2))
"""Frames, and feature rows along height and width: two images of different size, and a video."""


def with_images(sample: Sample, sight: Sight) -> Sample:
    """Return a sample in whose documents images take the place of text.

    The token that a leak is looked for with stays text; images come behind it. Borders are told by cu_seqlens, since
    positions of one axis do not tell those of images.
    """
    made = torch.Generator().manual_seed(len(sample.name))
    ids, labels = sample.ids.clone(), sample.batch["labels"].clone()
    own: dict[Document, dict[str, Tensor]] = {}
    for document in sample.documents:
        at, fields = document.start + len(document) // 3 + 2, {}
        for frames, height, width in _ITEMS:
            tokens = _tokens(frames, height * width, sight)
            if at + len(tokens) >= document.stop:
                break
            here = slice(at, at + len(tokens))
            ids[document.row, here] = torch.where(tokens >= 0, tokens, ids[document.row, here])
            labels[document.row, here] = IGNORED
            at += len(tokens) + 1
            grid = torch.tensor([[frames, height * sight.merge, width * sight.merge]])
            pixels = torch.randn(int(grid.prod()), sight.width, generator=made)
            kind = ("pixel_values", "image_grid_thw") if frames == 1 else ("pixel_values_videos", "video_grid_thw")
            for name, value in zip(kind, (pixels, grid), strict=True):
                fields[name] = torch.cat([fields[name], value]) if name in fields else value
        if fields:
            own[document] = fields
    types = (ids == sight.tokens[0]).long() + 2 * (ids == sight.tokens[1]).long()
    for document, fields in own.items():
        fields["mm_token_type_ids"] = types[document.row : document.row + 1, document.start : document.stop]
    batch: dict[str, Any] = {**sample.batch, "input_ids": ids, "labels": labels, "mm_token_type_ids": types}
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        found = [fields[name] for fields in own.values() if name in fields]
        batch |= {name: torch.cat(found)} if found else {}
    if batch.pop("position_ids", None) is not None:
        batch["cu_seqlens"] = torch.tensor([0, *(d.row * ids.shape[1] + d.stop for d in sample.documents)])
    return replace(sample, batch=batch, images=own)


def _tokens(frames: int, rows: int, sight: Sight) -> Tensor:
    """Return the tokens of an image or a video; -1 where text stays, between frames of models that tell their times."""
    if frames == 1:
        return torch.full((rows,), sight.tokens[0])
    frame = [sight.tokens[1]] * rows
    between = [-1] if sight.times else []
    return torch.tensor([*(frame + between) * (frames - 1), *frame])

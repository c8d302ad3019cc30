"""Batches with images, for models that have a vision tower."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from longspan.check.samples import IGNORED, Sample
from longspan.integrations.multimodal import Sight

_SIDE = 2
"""Feature rows along an image's height and width."""

_BEFORE, _BESIDE = 2, 4
"""Tokens of text before an image, and the least that there must be besides it."""


def illustrated(sample: Sample, sight: Sight) -> Sample:
    """Return a sample with an image in each document that is long enough: some of its tokens stand for feature rows.

    Documents of a packed batch are told by `cu_seqlens`, since position ids then say something else.
    """
    rows, features = len(sample.ids), _SIDE**2
    ids, labels = sample.ids.clone(), sample.batch["labels"].clone()
    pictured = tuple(d for d in sample.documents if len(d) >= features + _BESIDE)
    if not pictured:
        return sample
    for document in pictured:
        at = slice(document.start + _BEFORE, document.start + _BEFORE + features)
        ids[document.row, at], labels[document.row, at] = sight.tokens[0], IGNORED
    grid = torch.tensor([[1, _SIDE * sight.merge, _SIDE * sight.merge]]).expand(len(pictured), -1)
    generator = torch.Generator().manual_seed(rows)
    batch = {
        **{name: value for name, value in sample.batch.items() if name != "position_ids"},
        "input_ids": ids,
        "labels": labels,
        "mm_token_type_ids": (ids == sight.tokens[0]).long(),
        "pixel_values": torch.randn(int(grid.prod(1).sum()), sight.width, generator=generator),
        "image_grid_thw": grid,
    }
    if "position_ids" in sample.batch:
        batch["cu_seqlens"] = torch.tensor([0, *accumulate(len(document) for document in sample.documents)])
    return replace(sample, batch=batch, pictured=pictured)

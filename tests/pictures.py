"""Tiny models with a vision tower, batches of documents with images, and what one device computes for each alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE, VIDEO, VOCABULARY = 40, 41, 44
PATCH, MERGE = 2, 2
WIDTH = 3 * 2 * PATCH**2  # channels, frames of a patch, pixels

Item = int | tuple[int, int] | tuple[int, int, int]
"""Tokens of text, an image of so many feature rows by height and width, or a video of frames of these."""


def build(family: str, layers: int = 4, seed: int = 0) -> Any:
    """Build `qwen2_5_vl` or `qwen3_vl` in fp64; Qwen3-VL adds features after its first two layers."""
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8 if family == "qwen3_vl" else 4,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0]},
    }
    vision: dict[str, Any] = {"depth": 3, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2}
    vision |= {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 24}
    if family == "qwen3_vl":
        text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
    else:
        vision |= {"window_size": 8, "fullatt_block_indexes": [1]}
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO
    )
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.dim() > 1 else p + 0.1 * torch.randn_like(p))
    return model.train()


@dataclass(frozen=True)
class Album:
    """Rows of documents; each document is a sequence of items.

    Args:
        borders: how a packed batch tells its documents: `cu_seqlens`, `attention_mask`, `[4, B, S]`; None if each row
            is one document.
    """

    family: str
    rows: Sequence[Sequence[Sequence[Item]]]
    seed: int = 0
    borders: str | None = None

    def alone(self) -> list[dict[str, Any]]:
        """Return each document's own batch."""
        make = torch.Generator().manual_seed(self.seed)
        return [self._document(items, make) for row in self.rows for items in row]

    def batch(self) -> dict[str, Any]:
        """Return the full batch, rows padded to the longest."""
        documents = iter(self.alone())
        rows = [[next(documents) for _ in row] for row in self.rows]
        tokens = max(sum(d["input_ids"].shape[1] for d in row) for row in rows)
        full: dict[str, Any] = {"input_ids": [], "labels": [], "mm_token_type_ids": []}
        mask = torch.zeros(len(rows), tokens, dtype=torch.long)
        for i, row in enumerate(rows):
            for name, parts in full.items():
                joined = torch.cat([d[name] for d in row], 1)
                fill = -100 if name == "labels" else 0
                parts.append(F.pad(joined, (0, tokens - joined.shape[1]), value=fill))
            lengths = torch.tensor([d["input_ids"].shape[1] for d in row])
            numbers = torch.arange(1, len(row) + 1) if self.borders == "attention_mask" else torch.ones(len(row)).long()
            mask[i, : int(lengths.sum())] = numbers.repeat_interleave(lengths)
        batch = {name: torch.cat(parts) for name, parts in full.items()}
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            found = [d[name] for row in rows for d in row if name in d]
            batch |= {name: torch.cat(found)} if found else {}
        if self.borders == "cu_seqlens":
            ends = torch.tensor([d["input_ids"].shape[1] for row in rows for d in row]).cumsum(0)
            return batch | {"cu_seqlens": F.pad(ends, (1, 0))}
        if self.borders == "[4, B, S]":
            return batch | {
                "position_ids": torch.cat([torch.cat([_rows_of(self.family, d) for d in row], -1) for row in rows], 1)
            }
        return batch if bool(mask.all()) and self.borders is None else batch | {"attention_mask": mask}

    def targets(self) -> int:
        """Count the targets."""
        return sum(int((d["labels"][:, 1:] != -100).sum()) for d in self.alone())

    def _document(self, items: Sequence[Item], make: torch.Generator) -> dict[str, Any]:
        ids: list[int] = []
        grids: dict[str, list[list[int]]] = {"image": [], "video": []}
        for item in items:
            if isinstance(item, int):
                ids += torch.randint(1, IMAGE, (item,), generator=make).tolist()
            elif len(item) == 2:
                ids += [IMAGE] * (item[0] * item[1])
                grids["image"].append([1, item[0] * MERGE, item[1] * MERGE])
            else:
                frame = [VIDEO] * (item[1] * item[2])
                between = [7] if self.family == "qwen3_vl" else []  # a time stamp
                ids += (frame + between) * (item[0] - 1) + frame
                grids["video"].append([item[0], item[1] * MERGE, item[2] * MERGE])
        tokens = torch.tensor([ids])
        labels = tokens.masked_fill(torch.rand(tokens.shape, generator=make) < 0.125, -100)
        types = (tokens == IMAGE).long() + 2 * (tokens == VIDEO).long()
        found: dict[str, Any] = {"input_ids": tokens, "labels": labels, "mm_token_type_ids": types}
        for kind, values in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if grids[kind]:
                grid = torch.tensor(grids[kind])
                pixels = torch.randn(int(grid.prod(1).sum()), WIDTH, generator=make, dtype=torch.float64)
                found |= {values: pixels, f"{kind}_grid_thw": grid}
        return found


def _rows_of(family: str, document: dict[str, Any]) -> Tensor:
    """Return position ids [4, 1, S] of a document, those of text in front, from the model's own code."""
    asked = {name: value for name, value in document.items() if name.endswith(("_ids", "_thw"))}
    axes, _ = build(family, layers=1).model.get_rope_index(**asked)
    text = torch.arange(document["input_ids"].shape[1])[None, None]
    return torch.cat([text, axes])


def one_device(model: Any, albums: Sequence[Album]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the mean over all targets, each document run by itself."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    targets, total = sum(album.targets() for album in albums), 0.0
    for document in (d for album in albums for d in album.alone()):
        labels = document.pop("labels")
        if not document["mm_token_type_ids"].any():
            del document["mm_token_type_ids"]
        logits = plain(**document, use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum") / max(targets, 1)
        if loss.requires_grad:  # a text without images says nothing about a tower
            loss.backward()
        total += float(loss.detach())
    return total, gradients(plain)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradients of what is trained, zero where there is none."""
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad
    }

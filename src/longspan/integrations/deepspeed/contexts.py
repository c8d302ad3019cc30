"""What a forward pass over divided rows must know, learned from the position ids of all ranks, once per micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attention.schedule import Schedule
from longspan.documents import Documents
from longspan.errors import BatchError
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.mesh import Mesh

_IN_FLIGHT = 8
"""Micro-batches whose layers may be recomputed in backward without asking the other ranks again."""


@dataclass(frozen=True)
class _Seen:
    """A context, and the tensors it was made of: held, so that their memory is not given to others meanwhile."""

    parts: tuple[Tensor | None, ...]
    versions: tuple[int | None, ...]
    schedule: Schedule
    views: dict[int | None, Schedule] = field(default_factory=dict)

    def within(self, window: int | None) -> Schedule:
        """Return the kernel calls for layers whose tokens see so many tokens, worked out once for all of them."""
        if window not in self.views:
            whole, mask = self.schedule, self.schedule.mask.within(window)
            self.views[window] = whole if mask == whole.mask else Schedule.of(mask, whole.layout, whole.ring_rank)
        return self.views[window]

    def of(self, parts: Sequence[Tensor | None]) -> bool:
        """Whether it was made of these tensors, or of other views of the same memory, unchanged."""
        return all(
            (mine is None and other is None)
            or (mine is not None and other is not None and version == other._version and _place(mine) == _place(other))
            for mine, other, version in zip(self.parts, parts, self.versions, strict=True)
        )


class Contexts:
    """Work out the kernel calls of micro-batches, of whose rows every rank holds the part of its place.

    Args:
        seq_length: tokens that every row has; None where lengths differ.
    """

    def __init__(self, mesh: Mesh, seq_length: int | None) -> None:
        self.mesh, self.seq_length = mesh, seq_length
        self._seen: deque[_Seen] = deque(maxlen=_IN_FLIGHT)

    def schedule(self, positions: Tensor, padding: Tensor | None, tokens: int, window: int | None = None) -> Schedule:
        """Return the kernel calls of a micro-batch.

        Args:
            positions: position ids [B, s] of this rank's tokens.
            padding: [B, s], false for padding, or None.
            tokens: s, what attention was given.
            window: tokens that each token sees, itself included; None for all before it.

        Cost: for a new micro-batch two small all-gathers over the sequence, and a host sync.

        Raises:
            BatchError: ranks that hold unlike parts, rows of another length than the fixed one, padding on the left.
        """
        parts = (positions, padding)
        for seen in self._seen:
            if seen.of(parts):
                return seen.within(window)
        if positions.dim() != 2 or positions.shape[1] != tokens:
            raise BatchError(
                f"position_ids must be [B, {tokens}] like the tokens of this rank, got {list(positions.shape)}."
            )
        schedule = self._make(positions, padding)
        versions = tuple(None if part is None else part._version for part in parts)
        self._seen.append(_Seen(parts, versions, schedule))
        return self._seen[-1].within(window)

    def _make(self, positions: Tensor, padding: Tensor | None) -> Schedule:
        axis, tokens = self.mesh.sequence, positions.shape[1]
        shape = torch.tensor([*positions.shape, padding is not None], device=positions.device)
        shapes = [part.tolist() for part in self._gathered(shape)]
        if any(other != shapes[0] for other in shapes):
            told = ", ".join(f"{list(found[:2])}{' with a mask' if found[2] else ''}" for found in shapes)
            raise BatchError(
                f"The {axis.size} ranks that share a sequence hold parts of unlike shape: {told}. Each must hold the "
                "same share of the same rows, as UlyssesSPDataLoaderAdapter gives it."
            )
        length = tokens * axis.size
        if self.seq_length is not None and length != -(-self.seq_length // axis.size) * axis.size:
            raise BatchError(
                f"This batch has {length} tokens per row ({tokens} on each of {axis.size} ranks); the model was "
                f"registered for {self.seq_length}. Register with seq_length_is_variable=True for batches that differ."
            )
        batch: dict[str, Any] = {"position_ids": torch.cat(self._gathered(positions.to(torch.int64)), 1)}
        rows = positions.shape[0]
        if padding is not None:
            batch["attention_mask"] = torch.cat(self._gathered(padding.to(torch.uint8)), 1)
            rows = len(padding)
        documents = Documents.find(batch, rows, length)
        layout = Layout(length, self.mesh.ring.size, self.mesh.ulysses.size, zigzag=False)
        return Schedule.of(Mask(length, documents.starts), layout, self.mesh.ring.rank)

    def _gathered(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.mesh.sequence.size)]
        dist.all_gather(parts, part.contiguous(), group=self.mesh.sequence.group)
        return parts


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

"""Collectives among the ranks that hold different rows: to a Trainer, they are all the processes there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import Tensor

from longspan.agreement import partner_refuses, refuse_together
from longspan.errors import BatchError
from longspan.mesh import Mesh


@dataclass(frozen=True)
class Replicas:
    """The data axis of a mesh."""

    mesh: Mesh
    device: torch.device

    @property
    def size(self) -> int:
        """Number of data ranks."""
        return self.mesh.data.size

    def gather(self, data: Any) -> Any:
        """Put the tensors of (nested) data of all data ranks next to each other along their first dim."""
        return recursively_apply(self._gather, data, error_on_other_type=True)

    def gather_objects(self, data: Any) -> list[Any]:
        """Return the lists of all data ranks as one."""
        if self.size == 1:
            return list(data)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, data, group=self.mesh.data.group)
        return [item for part in found for item in part]

    def mean(self, value: Tensor, weight: int | Tensor = 1) -> Tensor:
        """Average over the data ranks, without gradient; evenly where no rank has any weight."""
        value = value.detach()
        if self.size == 1:
            return value
        share = torch.as_tensor(weight, device=value.device).to(value.dtype)
        sums = torch.stack([(value * share).where(share > 0, 0.0), share, value])
        dist.all_reduce(sums, group=self.mesh.data.group)
        return torch.where(sums[1] > 0, sums[0] / sums[1], sums[2] / self.size)

    def smallest(self, count: int) -> int:
        """Return the smallest count of all data ranks."""
        if self.size == 1:
            return count
        least = torch.tensor(count, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.mesh.data.group)
        return int(least)

    def count(self, targets: int | Tensor, seen: Tensor, problem: Exception | None) -> Tensor:
        """Add up targets over the data ranks, once all ranks of each sequence are seen to have read the same.

        Args:
            seen: 0-d, equal on ranks that read the same batches.
            problem: why this rank's batches cannot be used; raised, and then no rank is left waiting.

        Returns:
            0-d int64.
        """
        sequence = self.mesh.sequence
        if sequence.size > 1:
            failed = torch.full_like(seen, -int(problem is not None))
            edges = torch.stack([seen, -seen, failed]).to(self.device)
            dist.all_reduce(edges, dist.ReduceOp.MIN, group=sequence.group)
            low = edges.tolist()
            problem = problem or partner_refuses(bool(low[2]))
            if problem is None and low[0] != -low[1]:
                problem = BatchError(
                    f"The {sequence.size} ranks that share a sequence read different batches. Shuffle by the seed of "
                    "the training arguments alone, and keep random numbers out of the data set and the collator, or "
                    "seed them alike on all ranks."
                )
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        counts[0] += targets
        counts[1] += problem is not None
        if self.size > 1:
            dist.all_reduce(counts, group=self.mesh.data.group)
        if problem is not None or (self.size > 1 and int(counts[1])):
            refuse_together(problem, self.mesh.data)
        return counts[0]

    def _gather(self, tensor: Tensor) -> Tensor:
        tensor = (tensor[None] if tensor.dim() == 0 else tensor).contiguous()
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self.mesh.data.group)
        return torch.cat(parts)

"""Feed every rank its part of the same batches, and stop all ranks together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.agreement import partner_refuses, refuse_together
from longspan.batch import CONTEXT
from longspan.errors import BatchError
from longspan.mesh import Axis, Mesh

Part = dict[str, Any]


class ShardedLoader:
    """Iterate over a data loader whose sequence-parallel ranks read the same batches.

    Yields this rank's part of each batch, on the device of the batch. Batches are taken in groups of `accumulation`
    micro-batches; the parts of a group carry the number of targets of the whole optimizer step (over the data ranks
    and the group). When a data rank runs out of batches, all ranks stop after the last group that every rank can
    fill, so no collective is left waiting; `dropped` then counts the batches read here that were not used.

    Args:
        shard: makes the part of a batch, as `handle.shard`.
        accumulation: micro-batches per optimizer step.

    Raises:
        BatchError: sequence-parallel ranks read different batches, or a batch cannot be sharded; on every rank, so that
            no data rank waits for one that has stopped. Other errors in sharding are raised as they are, and as
            BatchError on the other data ranks.

    Cost: three small all-reduces per group.
    """

    def __init__(
        self, batches: Iterable[Mapping[str, Any]], shard: Callable[..., Part], mesh: Mesh, accumulation: int = 1
    ) -> None:
        if accumulation < 1:
            raise BatchError(f"accumulation must be at least 1, got {accumulation}.")
        self.batches, self.shard, self.mesh, self.accumulation = batches, shard, mesh, accumulation
        self.consumed = 0
        self.dropped = 0
        self._skip = 0

    def __len__(self) -> int:
        """Batches per epoch of this rank's data, in whole groups."""
        count = len(self.batches)  # type: ignore[arg-type]
        return count - count % self.accumulation

    def __iter__(self) -> Iterator[Part]:
        source = iter(self.batches)
        self.consumed, self._skip = self._skip, 0
        for _ in range(self.consumed):
            next(source, None)
        while True:
            group = list(islice(source, self.accumulation))
            if not self._all_full(len(group) == self.accumulation):
                self.dropped = len(group)
                self.consumed = 0  # what is saved from here on is the start of the next epoch
                return
            parts, items = self._cut(group)
            while parts:
                self.consumed += 1
                part = parts.pop(0)  # not kept: with it goes what layers have worked out on the device for it
                yield part | {CONTEXT: replace(part[CONTEXT], num_items=items)}

    def state_dict(self) -> dict[str, Any]:
        """Return where iteration stands: after its end, at the start of the next epoch.

        An inner loader that keeps a state itself says where it stands instead.

        Raises:
            BatchError: in the middle of a group, from which iteration cannot be continued.
        """
        begun = self.consumed % self.accumulation
        if begun:
            raise BatchError(
                f"{begun} of {self.accumulation} micro-batches of an optimizer step are taken; save between steps."
            )
        inner = getattr(self.batches, "state_dict", None)
        return {"inner": inner()} if inner else {"consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict` at the next iteration."""
        if "inner" in state:
            self.batches.load_state_dict(state["inner"])  # type: ignore[attr-defined]
        self.consumed = self._skip = 0 if "inner" in state else int(state["consumed"])

    def _all_full(self, full: bool) -> bool:
        flag = torch.tensor([int(full)], device=self.mesh.device_type)
        return bool(_reduce(flag, self.mesh.world, dist.ReduceOp.MIN))

    def _cut(self, group: list[Mapping[str, Any]]) -> tuple[list[Part], int | Tensor]:
        """Return the parts of a group and the targets of the step; if one data rank cannot, all ranks raise."""
        parts: list[Part] = []
        problem: Exception | None = None
        try:
            parts = [self.shard(batch) for batch in group]
        except Exception as error:  # whatever it is, the other ranks would wait
            problem = error
        problem = self._shared(group, problem)
        counts = torch.tensor([0, int(problem is not None)], device=self.mesh.device_type)
        for part in parts:
            counts[0] += part[CONTEXT].targets
        total, problems = _reduce(counts, self.mesh.data, dist.ReduceOp.SUM)
        if int(problems):
            refuse_together(problem, self.mesh.data)
        return parts, total if total.is_cuda else int(total)

    def _shared(self, group: list[Mapping[str, Any]], problem: Exception | None) -> Exception | None:
        """Return an error on all ranks of a sequence if they read different batches or one of them has a problem."""
        digest = int.from_bytes(_digest(group)[:7], "big")
        seen = torch.tensor([digest, -digest, -int(problem is not None)], device=self.mesh.device_type)
        low = _reduce(seen, self.mesh.sequence, dist.ReduceOp.MIN).tolist()
        if low[0] == -low[1]:
            return problem or partner_refuses(bool(low[2]))
        return BatchError(
            f"The {self.mesh.sequence.size} sequence-parallel ranks read different batches (batch {self.consumed}). "
            "Give them the same data order: seed the sampler alike, and let a DistributedSampler count data-parallel "
            "ranks only (handle.mesh.data)."
        )


def _reduce(value: Tensor, axis: Axis, op: Any) -> Tensor:
    if axis.size > 1:
        dist.all_reduce(value, op, group=axis.group)
    return value


def _digest(group: list[Mapping[str, Any]]) -> bytes:
    """Return a digest of the tensors of some batches."""
    digest = hashlib.blake2b()
    for batch in group:
        for name in sorted(batch):
            value = batch[name]
            digest.update(name.encode())
            if isinstance(value, Tensor):
                digest.update(str(tuple(value.shape)).encode())
                digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()

"""Every rank brings its own batches, and all ranks that share rows work on each of them, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from longspan.batch import IGNORE_INDEX
from longspan.errors import BatchError, ConfigError, LongspanError

_POSITION_IDS = (
    "A batch needs position_ids, by which tokens keep their places when rows are divided. For rows of one document: "
    "position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape[0], -1). For packed rows they restart at "
    "each document: position_ids = torch.cat([torch.arange(n) for n in document_lengths])[None]."
)


class UlyssesSPDataLoaderAdapter:
    """Turn each batch of every rank into a micro-step of all ranks, of which each gets its part of the rows.

    An epoch has `len(dl) * sp_world_size` micro-steps: rank 0's first batch, rank 1's first batch, and so on. Batches
    may differ in length, and rows that the ranks do not divide evenly are padded on the right. When one rank runs out
    of batches all stop, and `dropped` counts what this rank has read in vain. Each `for` loop begins an epoch.

    Args:
        dl: yields mappings with input_ids [B, S], position_ids and labels; further tensors [B, S, ...] are cut as
            these are, anything else goes to all ranks as it is.
        sp_rank, sp_group, sp_world_size: this process's place, and the ranks that share rows.
        device: where batches are exchanged.

    Yields:
        The part of this rank on the CPU, with `shift_labels` in place of labels: the target of each token itself.

    Raises:
        BatchError: on all ranks, if one of them has a batch that cannot be divided.
        ConfigError: a place or size that is not the group's.

    Cost: per batch of each rank an all-gather of a description, and an all-to-all that sends each rank its part alone.
    """

    def __init__(
        self, dl: Iterable[Mapping[str, Any]], sp_rank: int, sp_group: Any, sp_world_size: int, device: Any
    ) -> None:
        size = dist.get_world_size(sp_group) if dist.is_initialized() and sp_group is not None else 1
        rank = dist.get_rank(sp_group) if size > 1 else 0
        if (rank, size) != (sp_rank, sp_world_size):
            raise ConfigError(
                f"sp_rank {sp_rank} of {sp_world_size} was given with a group in which it is {rank} of {size}."
            )
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, int(sp_world_size)
        self.device = torch.device(device)
        self.dropped = 0
        self._source: Iterator[Mapping[str, Any]] | None = None
        self._waiting: deque[dict[str, Any]] = deque()
        self._read = 0
        self._before: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None  # a loaded state, until iteration goes on from it

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size  # type: ignore[arg-type]

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        """Begin an epoch, or go on from a loaded state."""
        self._source, self._read = None, 0
        self._waiting.clear()
        return self

    def __next__(self) -> dict[str, Any]:
        if self._source is None:
            self._begin()
        if not self._waiting:
            self._refill()
        return self._waiting.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return where iteration stands: after its end, at the start of the next epoch.

        The inner loader's own state comes with it if it keeps one.
        """
        if self._resume is not None:
            return dict(self._resume)
        used = self.sp_world_size - len(self._waiting) if self._waiting else 0
        batches = self._read - 1 if used else self._read
        inner = getattr(self.dl, "state_dict", None)
        if inner is None:
            return {"batches": batches, "used": used}
        return {"inner": self._before if used else inner(), "used": used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` at the next iteration."""
        if "inner" in state:
            self.dl.load_state_dict(state["inner"])  # type: ignore[attr-defined]
        self._resume = dict(state)
        self._source = None

    def _begin(self) -> None:
        self._source = iter(self.dl)
        self._waiting.clear()
        self._read = self.dropped = 0
        if self._resume is None:
            return
        state, self._resume = self._resume, None
        used = int(state["used"])
        for _ in range(int(state.get("batches", 0))):
            next(self._source, None)
            self._read += 1
        if used:
            self._refill()
            for _ in range(used):
                self._waiting.popleft()

    def _refill(self) -> None:
        """Read one batch on each rank, and exchange their parts."""
        assert self._source is not None
        inner = getattr(self.dl, "state_dict", None)
        self._before = inner() if inner is not None else None
        batch = next(self._source, None)
        told, parts = _prepared(batch, self.sp_world_size)
        headers: list[Any] = [told]
        if self.sp_world_size > 1:
            headers = [None] * self.sp_world_size
            dist.all_gather_object(headers, told, group=self.sp_group)
        if any(header is None for header in headers):
            self.dropped = int(batch is not None)
            self._source, self._read = None, 0  # what is saved from here on is the start of the next epoch
            raise StopIteration
        self._raise_problems(headers)
        self._read += 1
        received = self._exchanged(parts, headers)
        for header, part in zip(headers, received, strict=True):
            self._waiting.append(_unpacked(header, part))

    def _raise_problems(self, headers: list[Any]) -> None:
        """Raise on every rank what one of them has found."""
        own = headers[self.sp_rank]["problem"]
        if own is not None:
            raise BatchError(own)
        for rank, header in enumerate(headers):
            if header["problem"] is not None:
                raise BatchError(
                    f"Rank {rank} of those that share rows has a batch that cannot be divided: {header['problem']}"
                )

    def _exchanged(self, parts: list[Tensor], headers: list[Any]) -> list[Tensor]:
        """Send each rank its part of this rank's batch, and return this rank's parts of all batches, on the CPU."""
        if self.sp_world_size == 1:
            return parts
        sizes = [header["nbytes"] for header in headers]
        out = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        sent = torch.cat(parts).to(self.device)
        dist.all_to_all_single(out, sent, sizes, [len(part) for part in parts], group=self.sp_group)
        return list(out.cpu().split(sizes))


def _prepared(batch: Mapping[str, Any] | None, ranks: int) -> tuple[dict[str, Any] | None, list[Tensor]]:
    """Describe a batch and cut it: the description, and the bytes of each rank's part.

    Returns:
        None in place of a description if there is no batch; a description with a problem if it cannot be cut.
    """
    if batch is None:
        return None, []
    try:
        fields, others = _fields(batch, ranks)
    except LongspanError as error:
        return {"problem": str(error)}, []
    tensors = {name: (field[0].shape, field[0].dtype) for name, field in fields.items()}
    parts = [torch.cat([_bytes(field[rank]) for field in fields.values()]) for rank in range(ranks)]
    return {"problem": None, "tensors": tensors, "others": others, "nbytes": len(parts[0])}, parts


def _fields(batch: Mapping[str, Any], ranks: int) -> tuple[dict[str, list[Tensor]], dict[str, Any]]:
    """Cut the tensors of a batch into one part per rank, and return what is no tensor beside them."""
    if "position_ids" not in batch:
        raise BatchError(_POSITION_IDS)
    missing = [name for name in ("input_ids", "labels") if not isinstance(batch.get(name), Tensor)]
    if missing:
        raise BatchError(f"A batch needs {' and '.join(missing)} as tensors [B, S]; it has {sorted(batch)}.")
    shape = batch["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise BatchError(f"input_ids must be [B, S] with at least one token, got {list(shape)}.")
    fields, others = {}, {}
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            others[name] = value
            continue
        if value.dim() < 2 or value.shape[1] != shape[1]:
            raise BatchError(
                f"{name} has shape {list(value.shape)}; tensors of a batch have the {shape[1]} tokens of input_ids "
                f"{list(shape)} along dim 1. Hand over anything else as a list or number."
            )
        fields["shift_labels" if name == "labels" else name] = _cut(name, value, ranks)
    return fields, others


def _cut(name: str, value: Tensor, ranks: int) -> list[Tensor]:
    """Divide a field [B, S, ...] evenly, padded on the right; labels move one token to the left first."""
    value = value.detach().cpu()
    if name == "labels":
        value = F.pad(value[:, 1:], (0, 1), value=IGNORE_INDEX)
    missing = -value.shape[1] % ranks
    if missing and name == "position_ids":  # they count on: padding belongs to the last document
        value = torch.cat([value, value[:, -1:] + torch.arange(1, missing + 1).to(value.dtype)], 1)
    elif missing:
        fill = IGNORE_INDEX if name in ("labels", "shift_labels") else 0
        value = F.pad(value, [0, 0] * (value.dim() - 2) + [0, missing], value=fill)
    return list(value.chunk(ranks, 1))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _unpacked(header: dict[str, Any], part: Tensor) -> dict[str, Any]:
    """Make the fields of a part from its bytes."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in header["tensors"].values()]
    pieces = zip(header["tensors"].items(), part.split(sizes), strict=True)
    fields = {name: piece.clone().view(dtype).view(shape) for (name, (shape, dtype)), piece in pieces}
    return {**fields, **header["others"]}

"""Which rows a rank reads: ranks that share a sequence read the same ones, and no row is evaluated twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from longspan.batch import IGNORE_INDEX
from longspan.errors import DataError


@dataclass(frozen=True)
class Share:
    """The rows of a batch over all data ranks that this rank reads.

    Args:
        size: rows of each data rank.
        replicas, replica: number of data ranks, and which of them this is.
        filled: whether a rank with fewer rows reads others again to have `size` of them; else only one without any
            reads another's.
    """

    size: int
    replicas: int
    replica: int
    filled: bool

    @property
    def together(self) -> int:
        """Rows of all data ranks."""
        return self.size * self.replicas

    def real(self, total: int) -> int:
        """Return how many of `total` rows are this rank's own."""
        return min(max(total - self.replica * self.size, 0), self.size)

    def of(self, rows: list[Any]) -> list[Any]:
        """Return what this rank reads of the rows of all: its own first."""
        start = self.replica * self.size
        mine = rows[start : start + self.size]
        missing = self.size - len(mine) if self.filled and self.replicas > 1 else int(not mine)
        return mine + rows[:1] * missing


class _Indices(BatchSampler):
    """Yield the indices of this rank's rows."""

    def __init__(self, sampler: Any, share: Share, drop_last: bool) -> None:
        super().__init__(sampler, share.size, drop_last)
        self.share = share

    def __iter__(self) -> Iterator[list[int]]:
        for rows in BatchSampler(self.sampler, self.share.together, self.drop_last):
            yield self.share.of(rows)

    def __len__(self) -> int:
        return len(BatchSampler(self.sampler, self.share.together, self.drop_last))


@dataclass(frozen=True)
class _Collate:
    """Collate this rank's rows of those of all data ranks, and say how many there are in all."""

    collate: Any
    share: Share

    def __call__(self, rows: list[Any]) -> tuple[Any, int]:
        return self.collate(self.share.of(rows)), len(rows)


class EvaluationRows:
    """Iterate over a data set that the data ranks divide, each row once.

    Every rank sees the same number of batches. Rows that a rank reads to have something to do at the end carry no
    labels.

    Args:
        loader: yields batches, or pairs of a batch and the rows of all data ranks if the data set has no length.
        rows: length of the data set, None if it has none.
    """

    def __init__(self, loader: Any, share: Share, rows: int | None) -> None:
        self.loader, self.share, self.rows = loader, share, rows
        self.total: int | None = None  # rows of all data ranks in the batch at hand

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            for index, item in enumerate(self.loader):
                if self.rows is None:
                    batch, self.total = item
                else:
                    batch, self.total = item, min(self.rows - index * self.share.together, self.share.together)
                yield self._own(batch)
        finally:
            self.total = None

    def _own(self, batch: Any) -> Any:
        """Take the labels off rows that other ranks evaluate."""
        assert self.total is not None
        real = self.share.real(self.total)
        if real == self.share.size or (real and not self.share.filled) or self.share.replicas == 1:
            return batch
        batch = dict(batch)
        for name in ("labels", "shift_labels"):
            labels = batch.get(name)
            if not isinstance(labels, Tensor):
                continue
            if real and len(labels) != self.share.size:
                raise DataError(
                    f"The data collator makes {len(labels)} rows of {self.share.size}, so longspan cannot tell the "
                    "last batch's rows from those that fill it up. To evaluate with predictions on "
                    f"{self.share.replicas} data ranks, set per_device_eval_batch_size=1, or make the number of rows a "
                    f"multiple of {self.share.together}."
                )
            batch[name] = labels.clone()
            batch[name][real:] = IGNORE_INDEX
        return batch


def training_rows(accelerator: Any, loader: DataLoader, replicas: int, replica: int) -> Any:
    """Divide a training loader over data ranks as accelerate does over processes."""
    return _prepared(accelerator, loader, replicas, replica)


def evaluation_rows(accelerator: Any, loader: DataLoader, share: Share) -> EvaluationRows:
    """Divide an evaluation loader over data ranks, each row once."""
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "multiprocessing_context", "persistent_workers", "worker_init_fn")
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    rows = None
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": share.together, "drop_last": loader.drop_last}
        options["collate_fn"] = _Collate(loader.collate_fn, share)
    else:
        rows = len(loader.sampler)  # type: ignore[arg-type]
        options["collate_fn"] = loader.collate_fn
        options["batch_sampler"] = _Indices(loader.sampler, share, loader.drop_last)
    return EvaluationRows(_prepared(accelerator, DataLoader(loader.dataset, **options), 1, 0), share, rows)


def _prepared(accelerator: Any, loader: DataLoader, replicas: int, replica: int) -> Any:
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=replicas,
        process_index=replica,
        put_on_device=accelerator.device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


def fingerprint(batches: list[Any]) -> Tensor:
    """Return a number, 0-d int64 on the batches' device, that tells lists of batches apart."""
    total = torch.full((), len(batches))
    for batch in batches:
        for name in sorted(batch):
            value = batch[name]
            if not isinstance(value, Tensor) or value.is_floating_point() or value.dim() == 0:
                continue
            flat = value.flatten().long()
            weights = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B1 + math.prod(value.shape[:1])
            total = total.to(flat.device) * 31 + (flat * weights).sum() + len(flat)
    return total % (1 << 62)

"""Write the tensors of a checkpoint, at once or while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from longspan.agreement import Agreement
from longspan.once import is_first
from longspan.optim.low_bit import unpacked


class Writing:
    """Tensors on their way to a folder, in the format of PyTorch's distributed checkpoints.

    What needs other processes (who writes what of which tensor) happens here and now; what is then left needs none, so
    that no collective of a thread can meet one of training.

    Args:
        folder: it exists.
        state: gives tensors by name; sharded ones are written shard by shard, what several processes hold once.
        agree: what processes say to each other.
        background: whether to copy what this process writes to host memory and let a thread write it; else it has been
            written when this returns.

    Raises:
        TrainingError: some process cannot plan or copy; all raise.

    Cost: two all-gathers of objects; in the background, host memory for what this process writes, until it is written.
    """

    def __init__(
        self, folder: Path, state: Callable[[], dict[str, Tensor]], agree: Agreement, *, background: bool
    ) -> None:
        self._writer = FileSystemWriter(str(folder), per_thread_copy_ahead=0)
        self._planner = _Planner()
        plans = agree(lambda: self._plan(state()))
        agree(lambda: self._share(plans, background))
        self._written: Future[Any] = Future()
        if background:
            threading.Thread(target=self._write, name="checkpoint", daemon=True).start()
        else:
            self._write()

    @property
    def busy(self) -> bool:
        """Whether this process is still writing."""
        return not self._written.done()

    def result(self) -> Any:
        """Wait until this process has written its part; raise what stood in its way."""
        return self._written.result()

    def complete(self, results: list[Any]) -> None:
        """Write the table of all tensors; the first process calls it.

        Args:
            results: of all processes.
        """
        self._writer.finish(self._table, results)

    def _plan(self, state: dict[str, Tensor]) -> SavePlan:
        self._planner.set_up_planner(dict(state), self._writer.storage_meta(), is_first())
        self._writer.set_up_storage_writer(is_first())
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _share(self, plans: list[SavePlan], background: bool) -> None:
        """Decide who writes what, alike on all processes, and copy this one's share."""
        planned, self._table = self._planner.create_global_plan(plans)
        shares = self._writer.prepare_global_plan(planned)
        self._own = self._planner.finish_plan(shares[dist.get_rank() if dist.is_initialized() else 0])
        if background:
            self._planner.stage()

    def _write(self) -> None:
        try:
            self._written.set_result(self._writer.write_data(self._own, self._planner).value())
        except BaseException as error:  # told by `result`, in the thread that can tell the other processes
            self._written.set_exception(error)


class _Planner(DefaultSavePlanner):
    """Takes tensors from where they are, or from copies."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[MetadataIndex, Tensor] = {}

    def stage(self) -> None:
        """Copy what this process writes to host memory, and let go of the tensors themselves."""
        self._copies = {item.index: self.resolve_data(item).detach().to("cpu", copy=True) for item in self.plan.items}
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return a tensor that is to be written."""
        copy = self._copies.pop(write_item.index, None)  # each is asked for once, and then gone
        return unpacked(super().resolve_data(write_item)) if copy is None else copy

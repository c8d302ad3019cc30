"""DistributedDataParallel: whole parameters on every process, gradients reduced in buckets during backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from longspan.engines.origin import Origin
from longspan.engines.protocol import GradReduction, OwnBackward, Prepared, clip_by_global_norm, require_processes


class DataParallel(OwnBackward):
    """Average gradients over dp x sp while backward runs."""

    name = "ddp"
    grad_reduction: GradReduction = "mean"

    def wrap(self, model: nn.Module, prepared: Prepared, origin: Origin | None = None) -> nn.Module:
        """Wrap over the processes of `mesh.world`.

        Buffers are not broadcast: they are rotary tables, equal by construction.

        Raises:
            TopologyError: torch.distributed is not initialised.
        """
        require_processes(self.name)
        if origin is not None:
            origin.bring(model)
        options: Any = {"broadcast_buffers": False, "gradient_as_bucket_view": True, "init_sync": origin is None}
        self._module = DistributedDataParallel(model, process_group=prepared.mesh.world.group, **options)
        return self._module

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Reduce in the last micro-batch's backward only."""
        if last:
            yield
        else:
            with self._module.no_sync():
                yield

    def reduce(self) -> None:
        """Do nothing: backward has reduced."""

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip by the global norm."""
        return clip_by_global_norm(self._module.parameters(), max_norm)

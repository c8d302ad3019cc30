"""Measure the steps of a run: seconds by phase, memory, and how much of what the hardware can do was used."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

import torch

from longspan.comm.pending import EXCHANGE
from longspan.mesh import Mesh
from longspan.stopwatch import Stopwatch
from longspan.train.metrics import Memory, Row, Work, largest_memory, peak_flops
from longspan.train.packing import Step

Phase = Literal["data", "forward", "backward", "reduce", "optimizer"]

T = TypeVar("T")


class Meter:
    """Measures each step of a process, from asking for its data to the end of its optimizer.

    The data of the next step is read before that end.

    Args:
        mesh: whose exchanges are measured too; they lie inside forward and backward.
        work: of the model, for MFU; None where it is not known.

    Cost: no host sync besides those of a step. Phases are read after its last one.
    """

    def __init__(self, device: torch.device, mesh: Mesh, work: Work | None) -> None:
        self._device, self._mesh, self._work = device, mesh, work
        self._phases = Stopwatch(device.type)
        self._waits = mesh.sequence.waits
        self._phases.running = True
        self._waits.running = mesh.sequence.size > 1
        self._peak, self._before = Memory(0, 0), 0
        self._start_s = time.perf_counter()

    def steps(self, source: Iterable[T]) -> Iterator[T]:
        """Yield what `source` does; a step begins when it is asked for."""
        items = iter(source)
        while True:
            self._start_s = time.perf_counter()
            if self._device.type == "cuda":  # building, reading and saving count too, but not as the step's
                self._before = max(self._before, torch.cuda.max_memory_allocated(self._device))
                torch.cuda.reset_peak_memory_stats(self._device)
            try:
                with self.phase("data"):
                    item = next(items)
            except StopIteration:
                return
            yield item

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Count what is done inside as a phase of the step."""
        return self._phases.span(name)

    def row(
        self, number: int, step: Step, *flags: bool, loss: float, grad_norm: float, lr: float
    ) -> tuple[Row, tuple[bool, ...]]:
        """Return the record of a step that has ended, and of each flag whether some process has set it.

        Cost: one all-reduce of a few numbers.
        """
        memory, peak, agreed = largest_memory(self._device, self._mesh, *flags, before=self._before)
        self._peak = self._peak.or_larger(peak)
        step_s = time.perf_counter() - self._start_s
        phases, waits = self._phases.take(), self._waits.take()
        row = Row(
            step=number,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=step.tokens,
            tokens_per_s=step.tokens / step_s,
            mfu=self._mfu(step, step_s, masked=True),
            mfu_full=self._mfu(step, step_s, masked=False),
            peak_gpu_bytes=self._peak.gpu_bytes,
            peak_host_bytes=self._peak.host_bytes,
            gpu_bytes=memory.gpu_bytes,
            host_bytes=memory.host_bytes,
            step_s=step_s,
            data_s=phases.get("data", 0.0),
            forward_s=phases.get("forward", 0.0),
            backward_s=phases.get("backward", 0.0),
            reduce_s=phases.get("reduce", 0.0),
            optimizer_s=phases.get("optimizer", 0.0),
            other_s=max(0.0, step_s - sum(phases.values())),
            exchange_s=waits.get(EXCHANGE, 0.0),
        )
        return row, agreed

    def _mfu(self, step: Step, step_s: float, masked: bool) -> float | None:
        peak = peak_flops(self._device)
        if peak is None or self._work is None:
            return None
        return self._work.flops(step.documents_tokens, masked) / (peak * self._mesh.world.size * step_s)

"""What a check is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.config import AdapterConfig
from longspan.keep import Memory


@dataclass(frozen=True)
class Settings:
    """What to check.

    Args:
        model: its name, for the report.
        sp: processes that share a sequence.
        ulysses, ring: None, both: the automatic degrees and the other ways to divide `sp`.
        packed: packed documents only.
        seq_len: tokens per row; None to choose.
        layers: of the model; None to choose.
        dtype: `float64` or `bfloat16`; None for the first on a CPU and the second on GPUs.
        kernel: of attention.
        memory: what layers keep, and in which tiles they run; None runs them whole and keeps everything.
        engine: who holds parameters and reduces gradients: `single`, `fsdp2`, or `zero-1` to `zero-3` in bfloat16.
        only: names of the samples to take; empty for all.
        adapter: what is trained in place of the model, all in `dtype`.
    """

    model: str
    sp: int
    ulysses: int | None = None
    ring: int | None = None
    packed: bool = False
    seq_len: int | None = None
    layers: int | None = None
    dtype: str | None = None
    kernel: str = "auto"
    memory: Memory | None = None
    engine: str = "single"
    only: tuple[str, ...] = ()
    adapter: AdapterConfig | None = None

    @property
    def adapted(self) -> str:
        """What is trained in place of the model, for the report; empty for the model itself."""
        return "" if self.adapter is None else f"{self.adapter.kind} {self.adapter.rank}"

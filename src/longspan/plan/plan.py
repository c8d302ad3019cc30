"""The decisions of one prepared model, or of one that is only planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from longspan.keep import Keep, Memory
from longspan.plan.machine import GIB


@dataclass(frozen=True)
class Plan:
    """What was decided, frozen and JSON-able.

    Args:
        kernel: attention kernel(s) in use.
        loss: how the loss is computed.
        reasons: why, one sentence each.
        seq_len: tokens of a row that the rest is about; None where no length has been seen yet.
        max_seq_len: the longest row that fits; None where it was not asked for.
        data_parallel_size: replicas that train on rows of their own, of a plan made before anything runs.
        level: how much is computed again: `graph`, `1F` (attention's forward runs once), `2F` (twice), or two of them.
        memory: what each layer keeps, in which tiles.
        kv_exchange: how keys come to the queries of other ring ranks in the last batch, and why.
        gpu_bytes, host_bytes: at the fullest moment of a step, by cause, per GPU and per rank.
        seconds: of a step, by cause.
        mfu: what the model must compute (causal attention, nothing twice) over what the GPUs could.
    """

    sequence_parallel_size: int
    ulysses_degree: int
    ring_degree: int
    kernel: str
    loss: str
    reasons: tuple[str, ...] = ()
    seq_len: int | None = None
    max_seq_len: int | None = None
    level: str | None = None
    engine: str | None = None
    optimizer: str | None = None
    memory: Memory | None = None
    kv_exchange: str | None = None
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    host_bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    mfu: float | None = None
    data_parallel_size: int = 1

    @property
    def step_s(self) -> float | None:
        """Seconds of a step."""
        return sum(self.seconds.values()) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain Python values."""
        plain = asdict(self)
        plain["memory"] = None if self.memory is None else _plain_memory(self.memory)
        plain["degrees"] = {
            "sequence_parallel": self.sequence_parallel_size,
            "ulysses": self.ulysses_degree,
            "ring": self.ring_degree,
            "data_parallel": self.data_parallel_size,
        }
        return {**plain, "step_s": self.step_s, "reasons": list(self.reasons)}

    def summary(self) -> str:
        """Return the plan in one line."""
        return (
            f"sequence parallel {self.sequence_parallel_size} = ulysses {self.ulysses_degree} x ring "
            f"{self.ring_degree}, kernel {self.kernel}, loss {self.loss} ({'; '.join(self.reasons)})"
        )

    @property
    def layers_keep(self) -> str:
        """What layers keep, and in which tiles; empty where no length has been seen yet."""
        return "" if self.memory is None else describe(self.memory)

    def headlines(self) -> list[str]:
        """Return what was decided for people, without bytes and seconds."""
        lines = [self.summary()]
        if self.kv_exchange is not None:
            lines.append(f"keys and values of the last batch: {self.kv_exchange}")
        if self.max_seq_len is not None:
            lines.append(f"longest row that fits: {self.max_seq_len:,} tokens")
        if self.memory is not None:
            lines.append(f"rows of {self.seq_len:,} tokens: level {self.level}, {self.layers_keep}")
        return lines

    def explain(self) -> str:
        """Return the plan for people: one line, and one per further question that it answers."""
        lines = self.headlines()
        for where, sizes in (("per GPU", self.gpu_bytes), ("on the host, per rank", self.host_bytes)):
            if sizes:
                parts = sorted(sizes.items(), key=lambda item: -item[1])
                causes = ", ".join(f"{cause} {size / GIB:.1f}" for cause, size in parts if size >= GIB / 20)
                lines.append(f"GiB {where}: {sum(sizes.values()) / GIB:.1f} ({causes})")
        if self.seconds:
            parts = sorted(self.seconds.items(), key=lambda item: -item[1])
            total = sum(self.seconds.values())
            causes = ", ".join(f"{cause} {s:.3g}" for cause, s in parts if s >= total / 200)
            rate = "" if self.tokens_per_s is None else f"; {self.tokens_per_s:,.0f} tokens/s"
            share = "" if self.mfu is None else f", MFU {100 * self.mfu:.0f} %"
            lines.append(f"seconds per step: {total:.3g} ({causes}){rate}{share}")
        return "\n  ".join(lines)


def describe(memory: Memory) -> str:
    """Return what layers keep, and in which tiles, in one line."""
    keeps = (memory.keep,) if isinstance(memory.keep, Keep) else memory.keep
    runs: list[list[Any]] = []
    for keep in keeps:
        if runs and runs[-1][0] is keep:
            runs[-1][1] += 1
        else:
            runs.append([keep, 1])
    if len(runs) == 1:
        text = f"every layer keeps {keeps[0]}"
    elif len(runs) <= 4:
        text = "layers keep " + ", ".join(f"{keep} ({count})" for keep, count in runs)
    else:
        text = "layers keep " + ", ".join(f"{keep} ({keeps.count(keep)})" for keep in Keep if keep in keeps)
    tiles = "" if memory.tile_tokens is None else f", in tiles of {memory.tile_tokens:,} tokens"
    return text + tiles + ("" if memory.compile is None else ", compiled")


def _plain_memory(memory: Memory) -> dict[str, Any]:
    plain = asdict(memory)
    for name in ("keep", "rebuilt"):
        value = plain[name]
        plain[name] = [str(keep) for keep in value] if isinstance(value, tuple) else str(value)
    return plain

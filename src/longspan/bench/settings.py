"""What a benchmark is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.bench.memory import parse_memory
from longspan.config import AdapterConfig
from longspan.errors import ConfigError
from longspan.plan.setup import IN_BACKWARD

AUTO = "auto"
ENGINES = ("single", "fsdp2", "zero-1", "zero-2", "zero-3")


@dataclass(frozen=True)
class Work:
    """What is trained, and by whom.

    Args:
        model: its name, for the report and for those that build it themselves.
        sp: processes, all of which share a sequence.
        layers: of the model; None for all.
        engine: `fsdp2` and `zero-N`: float32 parameters, bfloat16 compute on GPUs. `single`: parameters of the compute
            type, whole. `auto`: single where one process steps inside backward, else fsdp2.
        optimizer: a kind of `longspan.optim`.
        host_memory_bytes: what plans may use of this host.
        adapter: what is trained in place of the model, all in the compute type.
    """

    model: str
    sp: int
    layers: int | None = None
    ulysses: int | None = None
    ring: int | None = None
    kernel: str = "auto"
    engine: str = AUTO
    optimizer: str = "adamw"
    host_memory_bytes: int = 0
    seed: int = 0
    adapter: AdapterConfig | None = None

    def __post_init__(self) -> None:
        if self.engine not in (AUTO, *ENGINES):
            raise ConfigError(f"--engine must be {AUTO}, {', '.join(ENGINES)}, got {self.engine!r}.")

    @property
    def in_backward(self) -> bool:
        """Whether each parameter is stepped as soon as its gradient is there."""
        return self.sp == 1 and self.optimizer in IN_BACKWARD and self.engine in (AUTO, "single")

    @property
    def chosen_engine(self) -> str:
        """The engine, chosen where it was not given."""
        if self.engine != AUTO:
            return self.engine
        return "single" if self.in_backward else "fsdp2"


@dataclass(frozen=True)
class Setting:
    """One row to measure: a length, and what layers keep (see `longspan.bench.memory`)."""

    memory: str
    tokens: int


@dataclass(frozen=True)
class Asked:
    """What to measure.

    Args:
        steps: measured per setting, after one that warms up.
        profile: run one more step under the profiler.
        fit: run attention in a few calls only, see `handle.fit`.
    """

    work: Work
    settings: tuple[Setting, ...]
    steps: int = 3
    profile: bool = False
    fit: bool = False

    @property
    def longest_tokens(self) -> int:
        """Length of the longest row."""
        return max(setting.tokens for setting in self.settings)


def settings_of(memories: list[str], lengths: list[int]) -> tuple[Setting, ...]:
    """Combine memory settings with lengths; `TEXT@32768,131072` restricts one to some lengths.

    Raises:
        ConfigError: a setting that cannot be read, or a restriction to no number of tokens.
    """
    found = []
    for text in memories:
        memory, _, only = text.partition("@")
        if memory != AUTO:
            parse_memory(memory)
        try:
            tokens = [int(n) for n in only.split(",")] if only else lengths
        except ValueError:
            raise ConfigError(f"--memory {text}: after @ come numbers of tokens, got {only!r}.") from None
        found += [Setting(memory, n) for n in tokens]
    if any(setting.tokens < 2 for setting in found):
        raise ConfigError("A row to train on has at least 2 tokens.")
    return tuple(dict.fromkeys(found))

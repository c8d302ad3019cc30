"""What a plan predicts of memory is what the tensors of a step take: added up on CPUs, within ten percent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longspan.bench.fit import fit
from longspan.bench.memory import parse_memory
from longspan.bench.predict import Host, predicted
from longspan.bench.settings import Setting, Work
from longspan.bench.tracked import TrackedBytes
from longspan.bench.workload import build
from longspan.config import AdapterConfig
from longspan.integrations.presets import preset_config
from longspan.plan.machine import GIB
from pool import RunRanks

pytestmark = pytest.mark.dist

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 1 << 16,
}
LORA: dict[int, dict[str, Any]] = {n: {"adapter": AdapterConfig(kind="lora", rank=n)} for n in (8, 16)}
HELD_OUT: list[tuple[str, int, dict[str, Any]]] = [("512/x+O+KV/-", 2560, LORA[16]), ("512/x,O*3,x,none*3/-", 2048, {})]
"""Nothing in the plan was fitted to these."""
CASES: dict[int, list[tuple[str, int, dict[str, Any]]]] = {
    1: [("512/x+O/-", 1536, {"engine": "single"})],
    2: [
        ("-/graph/-", 1536, {}),
        ("256/x,O*7/-", 2048, {}),
        ("512/x,none*7/-/rebuilt=x+O", 2048, {}),
        ("-/graph/-", 1536, LORA[8]),
        *HELD_OUT,
    ],
}


class Row(dict[str, Any]):
    """A row of results that nobody reads."""

    def save(self) -> None:
        """Keep nothing."""

    def allows(self, needed_s: float, device: torch.device) -> bool:
        """Have time."""
        return True


def errors(world: int) -> list[tuple[str, float]]:
    """Take each step; return by how much its prediction is off."""
    return [
        (f"{text} {tokens} {changes}", error(world, text, tokens, changes)) for text, tokens, changes in CASES[world]
    ]


def error(world: int, text: str, tokens: int, changes: dict[str, Any]) -> float:
    """Take a step; return by how much its prediction is off."""
    others = TrackedBytes().held  # of what this process did before
    config, memory = preset_config("tiny-llama", **SHAPE), parse_memory(text)
    work = Work("tiny-llama", world, **changes)
    load = build(config, work, [memory], torch.device("cpu"))
    load.use(memory)
    row, case = Row(), Row()
    case.setting = Setting(text, tokens)  # pyright: ignore[reportAttributeAccessIssue]
    fit(load, case, row, row, row)  # pyright: ignore[reportArgumentType]
    expected = predicted(config, work, Host(None, world, 4 << 30, 8 << 30), tokens, memory)
    load.handle.remove()
    return expected["predicted_gib"] / (row["peak_gib"] - others / GIB) - 1


@pytest.mark.parametrize("world", [1, 2])
def test_memory_within_a_tenth(run_ranks: RunRanks, world: int) -> None:
    for case, error in run_ranks(world, errors, world, timeout_s=300)[0]:
        assert abs(error) < 0.10, (case, error)


def test_tracked_bytes() -> None:
    """Views count once, what is freed no more, and gradients are seen."""
    kept = torch.zeros(1000)
    tracked = TrackedBytes()
    before = tracked.held
    with tracked:
        more = kept + 1
        view = more.view(10, 100)
        del more
        assert tracked.held - before == 4000
        del view
        weight = torch.ones(100, 100, requires_grad=True)
        (weight * kept[:100]).sum().backward()
    assert tracked.held - before == 2 * 40_000  # the weight and its gradient
    assert tracked.peak - before >= 2 * 40_000

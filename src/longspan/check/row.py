"""What a model can do, as a row of the table of models: exact or refused, per way to divide it and to run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from longspan.check.compare import FLOAT64
from longspan.check.float64 import float64_throughout
from longspan.check.run import Bench, affordable, make_bench, under
from longspan.check.samples import samples
from longspan.check.settings import Settings
from longspan.errors import LongspanError
from longspan.integrations.multimodal import text_vocabulary
from longspan.integrations.random_weights import few_layers
from longspan.keep import Keep, Memory

_TOKENS = 75
_TILE_TOKENS = 13
_PACKED = "packed"
_EXACT, _REFUSED, _FAILED = "exact", "refused", "FAILED"


@dataclass(frozen=True)
class Way:
    """One way to divide and run a model, and the column of the table that tells of it.

    Args:
        tiles: layers run in tiles and keep little, each something else.
        engine: who holds the parameters.
        only: names of the samples; all if empty.
    """

    column: str
    ulysses: int
    ring: int
    tiles: bool = False
    engine: str = "single"
    only: tuple[str, ...] = ()

    @property
    def sp(self) -> int:
        """Processes that share a sequence."""
        return self.ulysses * self.ring


WAYS = (
    Way("ulysses", 2, 1),
    Way("ring", 1, 2),
    Way("streamed", 2, 1, tiles=True, only=("padded rows", _PACKED)),
    Way("streamed", 1, 2, tiles=True, only=("document", _PACKED)),
    Way("engine", 2, 1, engine="fsdp2", only=(_PACKED,)),
    Way("ulysses", 3, 1),
    Way("ring", 1, 3),
    Way("hybrid", 2, 2),
)
"""Ways of 2, 3 and 4 processes."""

COLUMNS = ("ulysses", "ring", "hybrid", _PACKED, "streamed", "engine")
"""Columns of the table; `packed` tells of packed documents under all ways that are not streamed or under an engine."""


@dataclass(frozen=True)
class Cell:
    """What a column says of a model: exact, or refused or failed for a reason."""

    said: str
    why: str = ""

    @property
    def exact(self) -> bool:
        """Whether nothing is missing."""
        return self.said == _EXACT

    def __str__(self) -> str:
        return f"{self.said} ({self.why})" if self.why else self.said


Cells = Mapping[str, Cell]


def check_ways(config: Any, settings: Settings, sp: int) -> list[dict[str, Any]] | None:
    """Check all ways of `sp` processes in float64; call it on each of these.

    Args:
        config: a transformers configuration; its weights are drawn.

    Returns:
        On the first rank a dict per way: its place in `WAYS` and its `cases`, or why it was `refused`. None elsewhere.

    Raises:
        LongspanError: the configuration makes no model.
    """
    config, _ = affordable(few_layers(config, settings.layers))
    text = config.get_text_config()
    found = []
    with float64_throughout():
        made = samples(settings.seq_len or _TOKENS, text_vocabulary(config), packed_only=False)
        bench = make_bench(config, made, FLOAT64, torch.device("cpu"), settings.adapter)
        for place, way in enumerate(WAYS):
            if way.sp == sp:
                memory = _memory(text.num_hidden_layers) if way.tiles else None
                asked = replace(settings, sp=sp, memory=memory, engine=way.engine, only=way.only)
                found.append({"way": place, **_cases(bench, asked, way)})
    return found if bench.truths else None


def _cases(bench: Bench, settings: Settings, way: Way) -> dict[str, Any]:
    try:
        _, cases = under(bench.only(settings.only), settings, way.ulysses, way.ring)
    except LongspanError as error:
        return {"refused": str(error)}
    return {"cases": [case.to_json() for case in cases]}


def _memory(layers: int) -> Memory:
    """Let layers keep different things, in tiles of which the last is smaller."""
    turn = (Keep.X, Keep.NONE, Keep.X_O, Keep.X_O_KV)
    return Memory(_TILE_TOKENS, tuple(turn[i % len(turn)] for i in range(layers)))


def cells(found: Iterable[Mapping[str, Any]]) -> Cells:
    """Turn what was found under all ways into the cells of a row."""
    said: dict[str, list[Cell]] = {column: [] for column in COLUMNS}
    for each in found:
        way = WAYS[each["way"]]
        dense = not way.tiles and way.engine == "single"
        columns = (way.column, _PACKED) if dense else (way.column,)
        if "refused" in each:
            for column in columns:
                said[column].append(Cell(_REFUSED, each["refused"]))
        for case in each.get("cases", ()):
            column = _PACKED if dense and case["name"].startswith(_PACKED) else way.column
            why = f"{case['name']}: {'; '.join(case['why'])}" if case["why"] else ""
            said[column].append(Cell(_FAILED, why) if why else Cell(_EXACT))
    return {column: _worst(each) for column, each in said.items()}


def _worst(said: Sequence[Cell]) -> Cell:
    order = (_FAILED, _REFUSED, _EXACT)
    return min(said, key=lambda cell: order.index(cell.said), default=Cell(_FAILED, "not checked"))


def row(name: str, model: str, found: Cells) -> str:
    """Write the row of a table in Markdown."""
    if len(set(found.values())) == 1 and found["ulysses"].said == _REFUSED:
        found = {column: cell if column == COLUMNS[0] else Cell(_REFUSED) for column, cell in found.items()}
    told = (str(found[column]).replace("|", "/") for column in COLUMNS)
    return "| " + " | ".join([name, f"`{model}`", *told]) + " |"

"""Needles scored by divided forward passes against the plain model on one process: its logits, and its decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

import longspan
from longspan import loss
from longspan.check.float64 import float64_throughout
from longspan.engines import build_engine
from longspan.evaluate.needle import evaluate
from longspan.keep import Keep, Memory
from needles import plain_scores, prompts, small_model
from pool import RunRanks

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
Scores = list[tuple[float, bool]]


def scored(ulysses: int, ring: int, tile_tokens: int | None, engine: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Evaluate on these ranks; return the cells, and the tokens that got logits in each forward pass of this rank."""
    made, counts = prompts(), []
    with float64_throughout(), counting(counts):
        model = small_model().double()
        memory = Memory() if tile_tokens is None else Memory(tile_tokens, Keep.X_O)
        handle = longspan.prepare(model, ulysses * ring, ulysses_degree=ulysses, ring_degree=ring, memory=memory)
        module = build_engine(engine, handle.mesh.world.size).wrap(model, handle)
        cells = evaluate(handle, made, module)
    assert model.training and not any(p.grad is not None for p in model.parameters())
    return cells, counts


@contextmanager
def counting(counts: list[int]) -> Iterator[None]:
    """Note how many tokens go through the head."""
    right = loss._scores

    def scores(logits: torch.Tensor, *rest: Any) -> Any:
        counts.append(len(logits))
        return right(logits, *rest)

    with patch.object(loss, "_scores", scores):
        yield


@pytest.fixture(scope="module")
def truth() -> Scores:
    made = prompts()
    with float64_throughout():
        found = plain_scores(small_model().double().eval(), [(row, made.ids(row)) for row in made.rows()])
    assert {match for _, match in found} == {True, False}, "both must occur"
    return found


@pytest.mark.parametrize(
    ("ulysses", "ring", "tile_tokens", "engine", "world"),
    [
        (1, 1, None, "single", 1),
        (2, 1, 7, "single", 2),
        (1, 2, 5, "single", 2),
        (2, 2, 6, "single", 4),
        (2, 1, 16, "fsdp2", 2),
        (1, 2, 9, "single", 4),  # two replicas of two
    ],
)
def test_scores_are_those_of_the_plain_model(
    run_ranks: RunRanks, truth: Scores, ulysses: int, ring: int, tile_tokens: int | None, engine: str, world: int
) -> None:
    answers = run_ranks(world, scored, ulysses, ring, tile_tokens, engine)
    assert all(_results(cells) == _results(answers[0][0]) for cells, _ in answers), "the same on every rank"
    rows = [row for cell in answers[0][0] for row in cell["rows"]]
    for row, (logp, match) in zip(rows, truth, strict=True):
        assert abs(row["logp"] - logp) <= TOLERANCE * abs(logp)
        assert row["match"] is match
    for cell in answers[0][0]:
        assert cell["matches"] == sum(row["match"] for row in cell["rows"])
        assert cell["mean_logp"] == pytest.approx(sum(row["logp"] for row in cell["rows"]) / 4, rel=1e-12)
    answer_tokens, replicas = 2, world // (ulysses * ring)
    assert sum(sum(counts) for _, counts in answers) == answer_tokens * len(rows), f"{replicas} replicas"


def _results(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells without their seconds, which each replica measures for itself."""
    return [{name: value for name, value in cell.items() if name != "seconds"} for cell in cells]

"""A batch that one replica cannot use ends the run on all processes, with the same words and at once."""

from __future__ import annotations

import io
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from launched import launched
from longspan.cli import failures
from longspan.train import loop
from longspan.train.progress import Progress
from pool import RunRanks
from runs import STEPS, config_of, corpus

pytestmark = pytest.mark.dist


Told = tuple[str, str, int]
"""The kind of an error, what it says, and the exit code of a process that ends with it."""


def spoilt(batch: dict[str, Any], what: str) -> dict[str, Any]:
    """Return a batch of token ids below 257 with something that no model can use."""
    if what == "a type":
        raise KeyError("row 7")
    values = batch[what].clone()
    values[0, 5] = 999 if what != "position_ids" else values[0, 4] + 7
    return batch | {what: values}


def train(config: Any, at: int, what: str) -> tuple[Told, Counter[str]]:
    """Train with a bad second micro-batch on the last replica; return the error, and the collectives there were."""
    plain, counts, codes = loop.steps, Counter[str](), list[int]()

    def steps(data: Any, recipe: Any, replica: int, rows: int) -> Iterator[Any]:
        for number, step in enumerate(plain(data, recipe, replica, rows), 1):
            if number == at and replica == recipe.replicas - 1:
                step.micro_batches[1] = spoilt(step.micro_batches[1], what)
            yield step

    def counted(name: str) -> Any:
        collective = getattr(dist, name)

        def count(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return collective(*args, **options)

        return count

    with ExitStack() as stack:
        if config.engine.startswith("zero"):
            stack.enter_context(launched())
        stack.enter_context(patch.object(loop, "steps", steps))
        stack.enter_context(patch.object(os, "_exit", codes.append))
        for name in ("all_reduce", "all_gather_object"):
            stack.enter_context(patch.object(dist, name, counted(name)))
        try:
            loop.train(
                config, corpus(), torch.device("cpu"), None if dist.get_rank() else Progress(io.StringIO(), STEPS)
            )
        except Exception as error:
            failures.end(error)
            return (type(error).__name__, str(error), codes[0]), counts
    return ("", "", 0), counts


CASES: list[tuple[str, int, int, str, str]] = [  # engine, sp, step, field, what is said of it
    (
        "ddp",
        2,
        3,
        "labels",
        "labels holds 999; the model's head has logits 0 to 256, and -100 marks tokens without a target (row 0, token "
        "5). Earlier steps and their checkpoints stand.",
    ),
    (
        "zero-3",
        1,
        2,
        "input_ids",
        "input_ids holds token 999; the model knows 0 to 256 (row 0, token 5). Is it another tokenizer's? Earlier "
        "steps and their checkpoints stand.",
    ),
    ("fsdp2", 2, 1, "position_ids", "Row 0: position_ids jump from 4 to 11 at token 5. If a document begins there"),
]


@pytest.mark.parametrize(("engine", "sp", "at", "what", "said"), CASES, ids=[case[0] for case in CASES])
def test_all_processes_end_alike(
    run_ranks: RunRanks, tmp_path: Path, engine: str, sp: int, at: int, what: str, said: str
) -> None:
    """In the words of the first that cannot go on, before the step begins; what was saved before stands."""
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    config = config_of(str(tmp_path), engine=engine, sequence_parallel_size=sp, save={"every": 1, "keep": 1})
    told = [told for told, _ in run_ranks(2 * sp, train, config, at, what, timeout_s=30)]
    assert told == [told[0]] * (2 * sp)
    assert told[0][0] == "BatchError" and told[0][2] == 2
    assert told[0][1].startswith(f"Cannot take step {at}: process {sp} says micro-batch 2 of 2 of replica 1: {said}")
    if at > 1:
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == at - 1
        assert (tmp_path / "checkpoints" / f"step-{at - 1:08}" / "commit.json").exists()


def test_an_error_of_another_kind_stays_itself(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Where it came, with its traceback; the other process says what it was."""
    config = config_of(str(tmp_path), engine="fsdp2", sequence_parallel_size=1, save={"final": False})
    (first, _), (second, _) = run_ranks(2, train, config, 2, "a type", timeout_s=30)
    assert second == ("KeyError", "'row 7'", 1)
    said = "Cannot take step 2: process 1 says KeyError: 'row 7'. Earlier steps and their checkpoints stand."
    assert first == ("TrainingError", said, 1)


def test_steps_that_can_be_used_cost_no_collective(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Processes ask each other before the first step alone; each more step has the all-reduces of its own work."""
    found = []
    for steps in (2, 3, 4):
        config = config_of(
            str(tmp_path / str(steps)),
            engine="ddp",
            sequence_parallel_size=1,
            max_steps=steps,
            save={"final": False},
        )
        (told, counts), _ = run_ranks(2, train, config, 0, "")
        assert told == ("", "", 0)
        found.append(counts)
    assert len({counts["all_gather_object"] for counts in found}) == 1
    more = [later["all_reduce"] - counts["all_reduce"] for counts, later in itertools.pairwise(found)]
    assert more == [3, 3]  # a sum of losses per micro-batch, and what a step tells of its memory and its flags

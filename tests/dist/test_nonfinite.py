"""Steps that are not finite: left out exactly, counted, and too many of them end the run."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from longspan.errors import ConfigError, TrainingError
from longspan.train import loop
from longspan.train.metrics import Row
from longspan.train.step import Taken
from pool import RunRanks
from runs import STEPS, config_of, result, run

SKIP: dict[str, Any] = {"faults": {"on_nonfinite": "skip", "max_skipped_steps": 1}}
ALONE: dict[str, Any] = {"engine": "single", "sequence_parallel_size": 1, "gradient_accumulation_steps": 1}
LORA = {"kind": "lora", "rank": 3, "dropout": 0.3}


@contextmanager
def poisoned(*numbers: int) -> Any:
    """Have gradients of the last process not be finite in some steps, before they are reduced."""
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    plain = loop.run_step

    def step(trainee: Any, data: Any, number: int, *rest: Any) -> Any:
        with ExitStack() as stack:
            if number in numbers and last:
                backward = trainee.engine.backward
                bad = patch.object(trainee.engine, "backward", lambda loss: backward(loss * math.nan))
                stack.enter_context(bad)
            return plain(trainee, data, number, *rest)

    with patch.object(loop, "run_step", step):
        yield


@contextmanager
def omitted(number: int) -> Any:
    """Have a step's batch passed over."""
    plain = loop.run_step

    def step(trainee: Any, data: Any, at: int, *rest: Any) -> Any:
        if at != number:
            return plain(trainee, data, at, *rest)
        nothing = {field.name: 0 for field in fields(Row)}
        row = Row(**nothing | {"step": at, "tokens": data.tokens, "mfu": None, "step_s": 1.0, "skipped": True})  # pyright: ignore[reportArgumentType]
        return Taken(row, (False, False, False))

    with patch.object(loop, "run_step", step):
        yield


def with_poison(config: Any, *numbers: int) -> str:
    """Train, and return what was told, or the error."""
    try:
        with poisoned(*numbers):
            return run(config)[1]
    except TrainingError as error:
        return f"{type(error).__name__}: {error}"


def without(config: Any, number: int) -> str:
    with omitted(number):
        return run(config)[1]


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes", [{"adapter": LORA}, {"engine": "ddp"}, {"optimizer": {"kind": "adamw-host"}}], ids=str
)
def test_a_skipped_step_leaves_no_trace(run_ranks: RunRanks, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Parameters, optimizer, dropout's random numbers and the place in the data are those of a run without it."""
    if "adapter" in changes:
        pytest.importorskip("peft", reason="adapters are PEFT's")
    found, wanted = str(tmp_path / "found"), str(tmp_path / "wanted")
    told, _ = run_ranks(2, with_poison, config_of(found, **SKIP, **changes), 3)
    run_ranks(2, without, config_of(wanted, **SKIP, **changes), 3)
    assert "step 3 is skipped: loss" in told and "gradient norm nan (1 skipped)" in told
    (rows, model), (expected, other) = result(found), result(wanted)
    assert [row for row in rows if row[0] != 3] == [row for row in expected if row[0] != 3]
    assert model == other
    lines = [json.loads(line) for line in (Path(found) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if line.get("skipped")] == [3] and lines[2]["grad_norm"] is None


@pytest.mark.dist
def test_too_many_end_the_run(run_ranks: RunRanks, tmp_path: Path) -> None:
    """On all processes, with what was saved before; those in a row are counted, also over a checkpoint."""
    for said in run_ranks(2, with_poison, config_of(str(tmp_path), **SKIP), 2, 4, 5):
        assert said.startswith("TrainingError: Step 5: loss") and "number 2 in a row" in said
        assert "max_skipped_steps is 1" in said and "not applied" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "checkpoints" / "step-00000004" / "commit.json").exists()
    for said in run_ranks(2, with_poison, config_of(str(tmp_path), **SKIP, resume=True), 5):
        assert "Step 5" in said and "number 2 in a row" in said
    told, _ = run_ranks(2, with_poison, config_of(str(tmp_path), **SKIP, resume=True))
    assert "going on after step 4" in told and "skipped" not in told


def test_without_skipping_the_first_ends_the_run(tmp_path: Path) -> None:
    said = with_poison(config_of(str(tmp_path), **ALONE), 3)
    assert said.startswith("TrainingError: Step 3: loss") and "The step was not applied. Lower" in said
    assert (tmp_path / "checkpoints" / "step-00000002" / "commit.json").exists()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": "zero-2", "sequence_parallel_size": 1}, "cannot leave out a step of engine zero-2"),
        (
            {**ALONE, "optimizer": {"step_in_backward": True, "max_grad_norm": None}},
            "cannot leave out a step that step_in_backward has taken",
        ),
    ],
)
def test_what_cannot_skip_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(str(tmp_path), **SKIP, **changes)


def test_parameters_stay_in_a_skipped_step(tmp_path: Path) -> None:
    """Bit for bit, and no gradient stays either."""
    seen: list[dict[str, torch.Tensor]] = []
    plain = loop.run_step

    def step(trainee: Any, data: Any, number: int, *rest: Any) -> Any:
        before = {name: p.detach().clone() for name, p in trainee.model.named_parameters()}
        taken = plain(trainee, data, number, *rest)
        after = {name: p.detach().clone() for name, p in trainee.model.named_parameters()}
        same = all(torch.equal(before[name], after[name]) for name in before)
        assert same == (number == 2) and all(p.grad is None for p in trainee.model.parameters())
        seen.append(after)
        return taken

    with patch.object(loop, "run_step", step):
        with_poison(config_of(str(tmp_path), **SKIP, **ALONE, max_steps=3, schedule={}, save={"final": False}), 2)
    assert len(seen) == 3

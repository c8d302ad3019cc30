"""Trainer and SFTTrainer train and evaluate as in one process, in fp64, on sequences divided over ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", reason="Trainer needs accelerate")


import trainers
from longspan.check.float64 import float64_throughout
from longspan.integrations.trainer import enable
from longspan.keep import Keep, Memory
from trainers import STEPS, Case, accelerated, build, make, smooth, whole

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
IN_FP32 = 1e-4
ENGINES = ("ddp", "fsdp2")
TOPOLOGIES = ((2, 2), (4, 2))
"""Processes, and how many of them share a sequence."""


class Truths:
    """What one process computes, each case once."""

    def __init__(self, run_ranks: Any) -> None:
        self.run_ranks, self.known = run_ranks, {}

    def __call__(self, **case: Any) -> dict[str, Any]:
        key = repr(case)
        if key not in self.known:
            self.known[key] = self.run_ranks(1, trainers.run, Case(engine="none", **case))[0]
        return self.known[key]


@pytest.fixture(scope="module")
def truth(run_ranks: Any) -> Truths:
    return Truths(run_ranks)


def check(found: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    assert found["eval"][-1] == pytest.approx(expected["eval"][-1], rel=tolerance)
    assert found["eval"][0] == pytest.approx(expected["eval"][-len(found["eval"])], rel=tolerance)
    compare(found["moved"], expected["moved"], tolerance)
    for mine, theirs in zip(
        [m for m in found["metrics"] if m][-5:], [m for m in expected["metrics"] if m][-5:], strict=True
    ):
        assert mine == pytest.approx(theirs, rel=tolerance)


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float(value.norm()) > 0, f"{name} did not move"
        error = float((found[name] - value).norm() / value.norm())
        assert error <= tolerance, (name, error)


def needs(kind: str) -> None:
    if kind in ("sft", "chat", "experts"):
        pytest.importorskip("trl", reason="SFTTrainer is TRL's")
        pytest.importorskip("datasets", reason="SFTTrainer needs datasets")


@pytest.mark.matrix
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["trainer", "sft", "chat"])
@pytest.mark.parametrize(("world", "size"), TOPOLOGIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_training_equals_one_process(
    run_ranks: Any, truth: Truths, engine: str, world: int, size: int, kind: str, lora: bool
) -> None:
    """Three steps of two micro-batches, of which one has no target; loss, norm, parameters, evaluation, metrics."""
    needs(kind)
    if lora:
        pytest.importorskip("peft", reason="adapters are PEFT's")
    expected = truth(kind=kind, lora=lora)
    for found in run_ranks(world, trainers.run, Case(engine, world, size, kind, lora)):
        check(found, expected)
        assert found["flos"] <= expected["flos"], "operations are counted once"


@pytest.mark.matrix
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["trainer", "sft"])
@pytest.mark.parametrize(("world", "size"), TOPOLOGIES)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_under_deepspeed_equals_one_process(
    run_ranks: Any, truth: Truths, stage: int, world: int, size: int, kind: str, lora: bool
) -> None:
    """As above, in fp32, and with a plain step: Adam's would blow up roundings of small gradients."""
    pytest.importorskip("longspan.engines.zero", reason="longspan has no engine for DeepSpeed")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    needs(kind)
    expected = truth(kind=kind, lora=lora, arguments={"optim": "sgd", "learning_rate": 0.1})
    for found in run_ranks(world, trainers.run, Case(f"zero-{stage}", world, size, kind, lora)):
        check(found, expected | ({} if stage else {"norms": []}), IN_FP32)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("flat", {"engine": "ddp"}),
        ("experts", {"engine": "ddp"}),
        ("trainer", {"engine": "fsdp2", "cp_axis": True}),
        ("trainer", {"engine": "ddp", "options": {"memory": Memory(5, Keep.X_O_KV)}}),
        ("trainer", {"engine": "fsdp2", "options": {"memory": Memory(4, (Keep.X, Keep.NONE))}}),
        ("trainer", {"engine": "ddp", "options": {"ring_degree": 2}}),
        ("trainer", {"engine": "ddp", "options": {"logits": True}}),
        ("trainer", {"engine": "ddp", "options": {"sequence_parallel_in_eval": False}}),
        ("sft", {"engine": "ddp", "options": {"sequence_parallel_in_eval": False}}),
        ("trainer", {"engine": "fsdp2", "arguments": {"gradient_checkpointing": True}}),
        ("trainer", {"engine": "ddp", "arguments": {"train_sampling_strategy": "random"}}),
        ("trainer", {"engine": "ddp", "arguments": {"train_sampling_strategy": "group_by_length"}}),
    ],
)
def test_settings(run_ranks: Any, truth: Truths, kind: str, case: dict[str, Any]) -> None:
    needs(kind)
    plain = {name: value for name, value in case.get("arguments", {}).items() if name != "gradient_checkpointing"}
    expected = truth(kind=kind, arguments=plain) if plain else truth(kind=kind, lora=False)
    for found in run_ranks(4, trainers.run, Case(world=4, size=2, kind=kind, **case)):
        if "group_by_length" in plain.values():  # Trainer groups rows for evaluation by the batch size of a process
            found["eval"] = expected["eval"]
        check(found, expected)


def train_with(case: Case, parts: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    with accelerated(case), float64_throughout(), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder, arguments=changed, **parts)
        if case.size > 1:
            enable(trainer, case.size, logits=True)
        before = whole(trainer.model)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"losses": losses, "moved": {name: v - before[name] for name, v in whole(trainer.model).items()}}


@pytest.mark.parametrize("what", ["compute_loss_func", "label_smoothing", "sft label_smoothing"])
def test_losses_of_logits(run_ranks: Any, what: str) -> None:
    parts = {"compute_loss_func": smooth} if what == "compute_loss_func" else {}
    changed = {} if parts else {"label_smoothing_factor": 0.1}
    kind = "sft" if "sft" in what else "trainer"
    needs(kind)
    expected = run_ranks(1, train_with, Case("none", kind=kind), parts, changed)[0]
    for found in run_ranks(4, train_with, Case("ddp", 4, 2, kind), parts, changed):
        assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
        compare(found["moved"], expected["moved"])


def resumed(case: Case, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float]]:
    """Train four steps at once, and two and then two more from a checkpoint, over two epochs of shuffled rows."""
    with accelerated(case), float64_throughout():
        ends, losses = [], []
        for name, steps, from_step in (("whole", 4, None), ("parts", 2, None), ("parts", 4, 2)):
            place = str(Path(folder) / name)
            changed = {
                "save_strategy": "steps",
                "save_steps": 2,
                "train_sampling_strategy": "random",
                "max_steps": steps,
                "lr_scheduler_type": "constant",
            }
            trainer = make(case, place, arguments=changed)
            enable(trainer, case.size)
            trainer.train(resume_from_checkpoint=None if from_step is None else str(Path(place) / "checkpoint-2"))
            ends.append(whole(trainer.model))
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        return ends[0], ends[2], losses[0], losses[2]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_equals_an_undisturbed_one(run_ranks: Any, tmp_path: Path, engine: str) -> None:
    for undisturbed, continued, losses, theirs in run_ranks(4, resumed, Case(engine, 4, 2), str(tmp_path)):
        assert theirs == pytest.approx(losses, rel=1e-12)
        assert all(torch.allclose(continued[name], undisturbed[name], rtol=0, atol=1e-12) for name in undisturbed)


def two_trainers(case: Case, both: bool) -> list[dict[str, Any]]:
    """Train a model over divided sequences and another beside it, turn by turn."""
    with accelerated(case), float64_throughout(), tempfile.TemporaryDirectory() as folder:
        first = make(case, folder)
        replicas = case.world // case.size if both else case.world
        changed = {} if both else {"per_device_train_batch_size": 2 // replicas}
        second = make(case, folder, model=build(seed=8), arguments=changed)
        enable(first, case.size)
        if both:
            enable(second, case.size)
        found = []
        for trainer in (first, second):
            before = whole(trainer.model)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            moved = {name: v - before[name] for name, v in whole(trainer.model).items()}
            found.append({"losses": losses, "moved": moved})
        found.append({"eval": first.evaluate()["eval_loss"]})
        return found


def alone(case: Case, seed: int) -> dict[str, Any]:
    with accelerated(case), float64_throughout(), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder, model=build(seed=seed))
        before = whole(trainer.model)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        moved = {name: v - before[name] for name, v in whole(trainer.model).items()}
        return {"losses": losses, "moved": moved, "eval": trainer.evaluate()["eval_loss"]}


@pytest.mark.parametrize("both", [True, False], ids=["both divided", "one divided"])
def test_two_trainers_in_one_process(run_ranks: Any, both: bool) -> None:
    expected = [run_ranks(1, alone, Case("none"), seed)[0] for seed in (7, 8)]
    for found in run_ranks(2, two_trainers, Case("ddp", 2, 2), both):
        for mine, theirs in zip(found[:2], expected, strict=True):
            assert mine["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)
            compare(mine["moved"], theirs["moved"])
        assert found[2]["eval"] == pytest.approx(expected[0]["eval"], rel=TOLERANCE)

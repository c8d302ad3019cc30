"""Trainer and SFTTrainer train and evaluate as in one process, in fp64, on sequences divided over ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

import trainers
from transformers import DataCollatorWithFlattening, Trainer
from trainers import STEPS, Case, Padded, accelerated, arguments, build, make, rows, whole

from longspan.check.float64 import float64_throughout
from longspan.errors import BatchError, ConfigError, LongspanError, TopologyError
from longspan.integrations.trainer import enable
from longspan.plan.keep import Keep, Memory

pytestmark = pytest.mark.dist

TOLERANCE = 1e-10
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


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert found["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
    assert found["eval"][-1] == pytest.approx(expected["eval"][-1], rel=TOLERANCE)
    assert found["eval"][0] == pytest.approx(expected["eval"][-len(found["eval"])], rel=TOLERANCE)
    compare(found["moved"], expected["moved"])
    for mine, theirs in zip([m for m in found["metrics"] if m][-5:], [m for m in expected["metrics"] if m][-5:]):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)


def compare(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float(value.norm()) > 0, f"{name} did not move"
        error = float((found[name] - value).norm() / value.norm())
        assert error <= TOLERANCE, (name, error)


def needs(kind: str) -> None:
    if kind in ("sft", "chat"):
        pytest.importorskip("trl", reason="SFTTrainer is TRL's")
        pytest.importorskip("datasets", reason="SFTTrainer needs datasets")


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


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("flat", {"engine": "ddp"}),
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


EVALUATIONS = ("padded", "flat", "iterable", "predictions", "iterable predictions")


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(rows(self.count))


def accuracy(predicted: Any) -> dict[str, float]:
    """Return the share of labels that were the most likely next token, and the number of rows."""
    likely, labels = predicted.predictions[:, :-1].argmax(-1), predicted.label_ids[:, 1:]
    known = labels != -100
    return {"accuracy": float((likely == labels)[known].mean()), "rows": len(labels), "labels": int(known.sum())}


def evaluate(case: Case, how: str, count: int) -> dict[str, float]:
    """Evaluate a number of rows that may not divide, and return all but times."""
    with accelerated(case), float64_throughout(), tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Any] = {"eval_dataset": Stream(count) if "iterable" in how else rows(count)}
        parts |= {"compute_metrics": accuracy} if "predictions" in how else {}
        collator = DataCollatorWithFlattening() if how == "flat" else Padded()
        trainer = Trainer(build(), arguments(case, folder), data_collator=collator, **parts)
        if case.size > 1:
            enable(trainer, case.size, logits="predictions" in how)
        found = trainer.evaluate()
        if "predictions" in how:
            predicted = trainer.predict(parts["eval_dataset"])
            found |= {f"value{i}": float(v) for i, v in enumerate(np.abs(predicted.predictions).sum((1, 2)))}
        assert found["eval_steps_per_second"] > 0
        steps = found["eval_steps_per_second"] * found["eval_runtime"]
        if "iterable" not in how:
            assert steps == pytest.approx(-(-count // 2), rel=0.05)
    return {k: v for k, v in found.items() if not k.endswith(("runtime", "second", "time"))}


@pytest.mark.parametrize("how", EVALUATIONS)
@pytest.mark.parametrize("count", [1, 5, 6])
def test_evaluation_equals_one_process(run_ranks: Any, how: str, count: int) -> None:
    """Each row once, also where data ranks have different numbers of them; rows 5 and 6 have no target."""
    expected = run_ranks(1, evaluate, Case("none"), how, count)[0]
    assert "predictions" not in how or expected["eval_rows"] == count
    for world, size in TOPOLOGIES:
        for found in run_ranks(world, evaluate, Case("ddp", world, size), how, count):
            assert found == pytest.approx(expected, rel=1e-8, nan_ok=True)


def smooth(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a loss of one's own, of all logits."""
    logits = outputs.logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses.square().sum() / (1 if num_items_in_batch is None else num_items_in_batch)


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
            made = arguments(case, place, **changed)
            trainer = Trainer(build(attention_dropout=0.0), made, data_collator=Padded(), train_dataset=rows())
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
        for mine, theirs in zip(found, expected):
            assert mine["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)
            compare(mine["moved"], theirs["moved"])
        assert found[2]["eval"] == pytest.approx(expected[0]["eval"], rel=TOLERANCE)


def state(trainer: Any) -> list[dict[str, Any]]:
    """Return the attributes of a trainer, its accelerator, arguments and all modules of its model."""
    owners = [trainer, trainer.accelerator, trainer.args, *trainer.model.modules()]
    return [dict(vars(owner)) for owner in owners]


def disabled(case: Case, trained: bool) -> None:
    with accelerated(case), float64_throughout(), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder, arguments={"gradient_checkpointing": True})
        model = trainer.model
        seen, config, values = state(trainer), dict(vars(model.config)), whole(model)
        enabled = enable(trainer, case.size)
        assert enable(trainer, case.size) is enabled
        with pytest.raises(ConfigError, match="enabled already"):
            enable(trainer, case.size, logits=True)
        with enabled.bypass():
            model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False)
        if trained:
            trainer.evaluate()
            trainer.train()
            enabled.disable()
            assert type(vars(model).get("forward")) is type(seen[3].get("forward"))
            assert trainer.compute_loss.__func__ is Trainer.compute_loss
            out = model(input_ids=torch.ones(1, 3, dtype=torch.long))
            assert out.logits.shape == (1, 3, trainers.VOCABULARY)
            return
        enabled.disable()
        enabled.disable()
        assert all(torch.equal(value, values[name]) for name, value in whole(model).items())
        now = state(trainer)
        assert [sorted(owner) for owner in now] == [sorted(owner) for owner in seen]
        for before, after in zip(seen, now):
            changed = [name for name in before if name != "config" and before[name] is not after[name]]
            assert all(before[name] == after[name] for name in changed), changed
        kept = {name: value for name, value in vars(model.config).items() if not name.startswith("_attn")}
        assert kept == {name: value for name, value in config.items() if not name.startswith("_attn")}
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("trained", [False, True])
def test_disable_gives_everything_back(run_ranks: Any, trained: bool) -> None:
    run_ranks(2, disabled, Case("ddp", 2, 2), trained)


def refused(case: Case, changed: dict[str, Any], parts: dict[str, Any], asked: dict[str, Any]) -> str:
    """Return why a trainer is refused; it must be left as it was."""
    with accelerated(case), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder, arguments=changed, **parts)
        before = state(trainer)
        try:
            enable(trainer, **({"sequence_parallel_size": case.size} | asked))
        except LongspanError as error:
            assert [sorted(owner) for owner in state(trainer)] == [sorted(owner) for owner in before]
            return f"{type(error).__name__}: {error}"
        return "nothing"


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "liger": ({"use_liger_kernel": True}, {}, {}, "fused_linear_cross_entropy=False"),
    "neftune": ({"neftune_noise_alpha": 5.0}, {}, {}, "leave it out"),
    "rebalance": ({"train_sampling_strategy": "batch_rebalance"}, {}, {}, "'group_by_length'"),
    "split": ({"accelerator_config": {"split_batches": True}}, {}, {}, "split_batches=True"),
    "dispatch": ({"accelerator_config": {"dispatch_batches": True}}, {}, {}, "dispatch_batches=True"),
    "tokens": ({"average_tokens_across_devices": False}, {}, {}, "leave it at True"),
    "batch size": ({"auto_find_batch_size": True}, {}, {}, "set the batch size"),
    "metrics": ({}, {"compute_metrics": accuracy}, {}, r"212 bytes per token\): pass enable"),
    "loss": ({}, {"compute_loss_func": smooth}, {}, "compute_loss_func needs the logits"),
    "smoothing": ({"label_smoothing_factor": 0.1}, {}, {}, "label_smoothing_factor needs the logits"),
    "no size": ({}, {}, {"sequence_parallel_size": None}, "Say how many ranks"),
    "bad size": ({}, {}, {"sequence_parallel_size": 3}, "does not divide the 2 processes"),
    "reduction": ({}, {}, {"grad_reduction": "sum"}, "enable takes no grad_reduction"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_combinations_are_refused(run_ranks: Any, name: str) -> None:
    changed, parts, asked, why = REFUSALS[name]
    import re

    for told in run_ranks(2, refused, Case("ddp", 2, 2), changed, parts, asked):
        assert re.search(why, told), told


def test_an_axis_of_another_size_is_refused(run_ranks: Any) -> None:
    case = Case("fsdp2", 2, 2, cp_axis=True)
    for told in run_ranks(2, refused, case, {}, {}, {"sequence_parallel_size": 1}):
        assert told.startswith("TopologyError") and "cp_size=2" in told


def unlike_batches(case: Case, how: str) -> str:
    with accelerated(case), tempfile.TemporaryDirectory() as folder:
        data = rows()
        if how == "other rows" and dist.get_rank() == 1:
            data = data[::-1]
        if how == "left padding" and dist.get_rank() < 2:
            data[0]["attention_mask"] = "left"
        trainer = make(case, folder, train_dataset=data, data_collator=Left() if how == "left padding" else Padded())
        enable(trainer, case.size)
        try:
            trainer.train()
        except BatchError as error:
            return str(error)
        return "nothing"


class Left(Padded):
    """Pad the first rows of some ranks on the left."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super().__call__([{k: v for k, v in e.items() if k != "attention_mask"} for e in examples])
        if any("attention_mask" in e for e in examples):
            batch["attention_mask"][:, 0] = 0
        return batch


def test_ranks_that_read_different_rows_are_told(run_ranks: Any) -> None:
    first, second, *others = run_ranks(4, unlike_batches, Case("ddp", 4, 2), "other rows")
    assert "share a sequence read different batches" in first and first == second
    assert all("data ranks cannot use their batch" in told for told in others)


def test_a_batch_that_cannot_be_cut_is_told_on_all_ranks(run_ranks: Any) -> None:
    told = run_ranks(4, unlike_batches, Case("ddp", 4, 2), "left padding")
    assert all("padding before" in text for text in told[:2])
    assert all("data ranks cannot use their batch" in text for text in told[2:])


def predict_without_logits(case: Case) -> str:
    with accelerated(case), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder)
        enable(trainer, case.size)
        with pytest.raises(ConfigError) as caught:
            trainer.predict(rows(4))
        return str(caught.value)


def test_predictions_need_logits(run_ranks: Any) -> None:
    assert all("logits=True" in told for told in run_ranks(2, predict_without_logits, Case("ddp", 2, 2)))

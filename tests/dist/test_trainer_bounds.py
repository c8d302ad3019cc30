"""What a sequence-parallel Trainer evaluates, refuses and gives back."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from transformers import DataCollatorWithFlattening, Trainer

import trainers
from longspan.check.float64 import float64_throughout
from longspan.errors import BatchError, ConfigError, LongspanError
from longspan.integrations.trainer import enable
from trainers import Case, Padded, accelerated, arguments, build, make, rows, smooth, whole

pytestmark = pytest.mark.dist

TOPOLOGIES = ((2, 2), (4, 2))
"""Processes, and how many of them share a sequence."""


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
        rows_each = 4 // (case.world // case.size)
        made = arguments(case, folder, per_device_eval_batch_size=rows_each)
        trainer = Trainer(build(), made, data_collator=collator, **parts)
        if case.size > 1:
            enable(trainer, case.size, logits="predictions" in how)
        found = trainer.evaluate()
        if "predictions" in how:
            predicted = trainer.predict(parts["eval_dataset"])
            real = [
                values[: len(row["input_ids"])] for values, row in zip(predicted.predictions, rows(count), strict=False)
            ]
            found |= {f"value{i}": float(np.abs(values).sum()) for i, values in enumerate(real)}
        assert found["eval_steps_per_second"] > 0
        steps = found["eval_steps_per_second"] * found["eval_runtime"]
        if "iterable" not in how:
            assert steps == pytest.approx(-(-count // 4), rel=0.05)
    return {k: v for k, v in found.items() if not k.endswith(("runtime", "second", "time"))}


@pytest.mark.parametrize("how", EVALUATIONS)
@pytest.mark.parametrize("count", [1, 7, 10])
def test_evaluation_equals_one_process(run_ranks: Any, how: str, count: int) -> None:
    """Each row once, also where data ranks have different numbers of them; rows 5 and 6 have no target."""
    expected = run_ranks(1, evaluate, Case("none"), how, count)[0]
    assert "predictions" not in how or expected["eval_rows"] == count
    for world, size in TOPOLOGIES:
        for found in run_ranks(world, evaluate, Case("ddp", world, size), how, count):
            assert found == pytest.approx(expected, rel=1e-8, nan_ok=True)


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
        for before, after in zip(seen, now, strict=True):
            changed = [name for name in before if name != "config" and before[name] is not after[name]]
            assert all(before[name] == after[name] for name in changed), changed
        kept = {name: value for name, value in vars(model.config).items() if not name.startswith("_attn")}
        assert kept == {name: value for name, value in config.items() if not name.startswith("_attn")}
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("trained", [False, True])
def test_disable_gives_everything_back(run_ranks: Any, trained: bool) -> None:
    run_ranks(2, disabled, Case("ddp", 2, 2), trained)


def test_disable_takes_the_hook_of_stage_3_off(run_ranks: Any) -> None:
    """A frozen embedding's output requires gradients under ZeRO-3, and no longer."""
    run_ranks(2, disabled, Case("zero-3", 2, 2, lora=True), False)


def refused(case: Case, changed: dict[str, Any], parts: dict[str, Any], asked: dict[str, Any]) -> str:
    """Return why a trainer is refused; it must be left as it was."""
    with accelerated(case), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder, arguments=changed, **parts)
        before = state(trainer)
        try:
            enable(trainer, asked.pop("sequence_parallel_size", case.size), **asked)
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
    for told in run_ranks(2, refused, Case("ddp", 2, 2), changed, parts, asked):
        assert re.search(why, told), told


def test_an_axis_of_another_size_is_refused(run_ranks: Any) -> None:
    case = Case("fsdp2", 2, 2, cp_axis=True)
    for told in run_ranks(2, refused, case, {}, {}, {"sequence_parallel_size": 1}):
        assert told.startswith("TopologyError") and "cp_size=2" in told


def divided_otherwise(case: Case) -> list[str]:
    """Return why trainers whose models are divided in other ways are refused."""
    told = []
    for how in ("tensor parallel", "device_map", "model_init"):
        with accelerated(case), tempfile.TemporaryDirectory() as folder:
            trainer = make(case, folder)
            if how == "tensor parallel":
                trainer.model._tp_size = 2
            elif how == "device_map":
                trainer.is_model_parallel = True
            else:
                trainer.model_init = build
            with pytest.raises(LongspanError) as caught:
                enable(trainer, case.size)
            told.append(str(caught.value))
    return told


def test_models_divided_in_other_ways_are_refused(run_ranks: Any) -> None:
    for tensor, devices, anew in run_ranks(2, divided_otherwise, Case("ddp", 2, 2)):
        assert "FSDP2 divide parameters over all ranks" in tensor
        assert "use FSDP2 instead" in devices
        assert "pass the model itself" in anew


def first_fsdp(case: Case) -> str:
    with accelerated(case), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder)
        trainer.accelerator.state.fsdp_plugin.fsdp_version = 1  # it cannot be made without a GPU
        with pytest.raises(ConfigError) as caught:
            enable(trainer, case.size)
        return str(caught.value)


def test_the_first_fsdp_is_refused(run_ranks: Any) -> None:
    for told in run_ranks(2, first_fsdp, Case("fsdp2", 2, 2)):
        assert "set fsdp_config={'version': 2}" in told, told


def unlike_batches(case: Case, how: str) -> str:
    with accelerated(case), tempfile.TemporaryDirectory() as folder:
        data: list[dict[str, Any]] = [dict(row) for row in rows()]
        if how == "other rows" and dist.get_rank() == 1:
            data = data[::-1]
        if how == "left padding" and dist.get_rank() < 2:
            data[0]["attention_mask"] = "left"
        if how == "other tokens" and dist.get_rank() < 2:
            data[0]["input_ids"] = [10_000, *data[0]["input_ids"][1:]]
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
    assert all("Data rank 0 (process " in told and "read different batches" in told for told in others)


def test_a_batch_that_cannot_be_cut_is_told_on_all_ranks(run_ranks: Any) -> None:
    for how, said in (("left padding", "padding before"), ("other tokens", "input_ids holds token 10000;")):
        told = run_ranks(4, unlike_batches, Case("ddp", 4, 2), how, timeout_s=30)
        assert all(text.startswith("Data rank 0 (process ") == (rank > 1) for rank, text in enumerate(told))
        assert all(said in text for text in told), told


def predict_without_logits(case: Case) -> str:
    with accelerated(case), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder)
        enable(trainer, case.size)
        with pytest.raises(ConfigError) as caught:
            trainer.predict(rows(4))
        return str(caught.value)


def test_predictions_need_logits(run_ranks: Any) -> None:
    assert all("logits=True" in told for told in run_ranks(2, predict_without_logits, Case("ddp", 2, 2)))


def taken(case: Case) -> list[tuple[int, int | None]]:
    """Return how many micro-batches each step takes, and their targets, where data ranks have 5 and 3 of them."""
    with accelerated(case), tempfile.TemporaryDirectory() as folder:
        enabled = enable(make(case, folder), case.size)
        replica = enabled.mesh.data.rank
        batches = iter([Padded()([row]) for row in rows()[6 * replica :][: 5 - 2 * replica]])
        steps = [enabled.trainer.get_batch_samples(batches, 2, torch.device("cpu")) for _ in range(4)]
        return [(len(step), None if items is None else int(items)) for step, items in steps]


def test_data_ranks_with_unlike_numbers_of_batches_stop_together(run_ranks: Any) -> None:
    given = [sum(label != -100 for label in row["labels"][1:]) for row in rows()]
    targets = [sum(given[i] for i in (0, 1, 6, 7)), sum(given[i] for i in (2, 8))]
    for steps in run_ranks(4, taken, Case("ddp", 4, 2)):
        assert steps == [(2, targets[0]), (1, targets[1]), (0, None), (0, None)]

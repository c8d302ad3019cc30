"""DeepSpeed's stages: five steps equal those of one process, in fp32, and the same model goes on after a restart."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from transformers import LlamaConfig, LlamaForCausalLM

import longspan
from launched import launched
from longspan.engines import MPU, Zero, build_engine
from longspan.errors import ConfigError, ModelError, TopologyError, TrainingError
from longspan.integrations.shapes import model_shape
from longspan.keep import Keep, Memory
from longspan.optim import choose_stepping
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB, Cluster
from longspan.plan.memory import Ledger
from longspan.plan.setup import Setup
from test_training import LAYOUTS, MAX_NORM, STEPS, History, Layout, build, micro_batches, optimizer_of, targets

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.dist

TOLERANCE = 2e-6
MEMORIES: dict[str, Any] = {
    "plain": Memory(),
    "x+O": Memory(6, Keep.X_O),
    "x, none": Memory(5, (Keep.X, Keep.NONE)),
    "auto": "auto",
    "compiled": Memory(4, Keep.X_O_KV, "eager"),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    stage: int
    layout: Layout
    memory: str = "x+O"
    adapters: bool = False
    tied: bool = False
    accumulation: int = 2
    dtype: torch.dtype = torch.float32


def model_of(adapters: bool = False, tied: bool = False) -> Any:
    model = build()
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    if not adapters:
        return model
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"]))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    return model.train()


def one_process(count: int, adapters: bool = False, tied: bool = False) -> History:
    """Train the unprepared model on all micro-batches of each step."""
    model = model_of(adapters, tied)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(trained)
    losses, norms = [], []
    for step in range(STEPS):
        batches, total = micro_batches(step, count), 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits, batch["labels"][0, 1:], reduction="sum") / targets(batches)
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(trained, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return History(losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()})


class Run:
    """A model under an engine."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.case, self.engine = case, Zero(case.stage, **options)
        self.model = model_of(case.adapters, case.tied).to(case.dtype)
        self.handle = longspan.prepare(
            self.model,
            case.layout.size,
            ring_degree=case.layout.ring,
            grad_reduction=self.engine.grad_reduction,
            memory=MEMORIES[case.memory],
        )
        self.module = self.engine.wrap(self.model, self.handle)
        optimizer = optimizer_of([p for p in self.module.parameters() if p.requires_grad])
        self.stepping = choose_stepping(optimizer, self.engine, False, MAX_NORM)

    def step(self, number: int) -> tuple[float, float]:
        """Take an optimizer step; data ranks take its micro-batches in turn."""
        replicas, replica = self.handle.mesh.data.size, self.handle.mesh.data.rank
        batches = micro_batches(number, self.case.accumulation * replicas)
        mine, total = batches[replica::replicas], 0.0
        self.stepping.begin(0.2)
        for index, batch in enumerate(mine):
            with self.engine.accumulating(last=index + 1 == len(mine)):
                loss = self.module(**self.handle.shard(batch, num_items=targets(batches))).loss
                self.engine.backward(loss)
            total += loss.item()
        self.engine.reduce()
        norm = float(self.stepping.norm())
        self.stepping.finish()
        return total, norm

    def parameters(self) -> dict[str, Tensor]:
        return {name: self.engine.whole(p).clone() for name, p in self.model.named_parameters()}


def divided(case: Case, **options: Any) -> History:
    with launched():
        run = Run(case, **options)
        steps = [run.step(number) for number in range(STEPS)]
        history = History([loss for loss, _ in steps], [norm for _, norm in steps], run.parameters())
        run.engine.close()
    return history


def check(found: History, expected: History, tolerance: float = TOLERANCE) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        error = float((found.parameters[name] - value).norm() / value.norm())
        assert error <= tolerance, (name, error)


@pytest.mark.matrix
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("memory", ["plain", "x+O"])
@pytest.mark.parametrize("layout", ["sp2 ulysses", "sp2 ring", "dp2 x sp2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_five_steps_equal_one_process(run_ranks: Any, stage: int, layout: str, memory: str, adapters: bool) -> None:
    case = Case(stage, LAYOUTS[layout], memory, adapters)
    expected = one_process(case.accumulation * case.layout.world // case.layout.size, adapters)
    start = {n: p.detach() for n, p in model_of(adapters).named_parameters() if p.requires_grad}
    assert max(expected.norms) > MAX_NORM, "clipping is at work"
    assert all(float((expected.parameters[n] - p).norm() / p.norm()) > 1e-3 for n, p in start.items()), "all move"
    for found in run_ranks(case.layout.world, divided, case):
        check(found, expected)


@pytest.mark.parametrize(
    ("stage", "layout", "memory", "adapters", "tied"),
    [
        (1, "sp2 ring", "x, none", False, True),
        (2, "hybrid 2x2", "x, none", True, False),
        (2, "dp2 x sp2", "auto", False, False),
        (3, "sp2 ulysses", "x, none", False, False),
        (3, "hybrid 2x2", "x, none", True, False),
        (3, "dp2 x sp2", "auto", False, True),
        (3, "sp2 ring", "compiled", False, True),
    ],
)
def test_rebuilt_compiled_and_tied(
    run_ranks: Any, stage: int, layout: str, memory: str, adapters: bool, tied: bool
) -> None:
    case = Case(stage, LAYOUTS[layout], memory, adapters, tied)
    expected = one_process(case.accumulation * case.layout.world // case.layout.size, adapters, tied)
    for found in run_ranks(case.layout.world, divided, case):
        check(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_process_alone(run_ranks: Any, stage: int) -> None:
    check(run_ranks(1, divided, Case(stage, Layout(1, 1, 1)))[0], one_process(2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_in_bf16(run_ranks: Any, stage: int) -> None:
    case, expected = Case(stage, LAYOUTS["sp2 ulysses"], dtype=torch.bfloat16), one_process(2)
    for found in run_ranks(2, divided, case):
        assert found.losses == pytest.approx(expected.losses, rel=0.03)
        assert found.norms == pytest.approx(expected.norms, rel=0.03)


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_steps_float32_parameters(run_ranks: Any, stage: int, reduce: torch.dtype) -> None:
    case = Case(stage, LAYOUTS["sp2 ulysses"])
    expected = one_process(2)
    for found in run_ranks(2, divided, case, compute_dtype=torch.bfloat16, reduce_dtype=reduce):
        assert all(p.dtype == torch.float32 for p in found.parameters.values())
        assert found.losses == pytest.approx(expected.losses, rel=0.03)
        assert found.norms == pytest.approx(expected.norms, rel=0.03)
        assert all(float((found.parameters[n] - p).norm() / p.norm()) < 0.03 for n, p in expected.parameters.items())


def resumed(case: Case, folder: str) -> tuple[History, History, dict[str, Any]]:
    """Train all steps; and again, with a fresh model and engine after the third."""
    with launched():
        first = Run(case)
        steps = [first.step(number) for number in range(3)]
        first.engine.save(Path(folder), {"step": 3})
        steps += [first.step(number) for number in range(3, STEPS)]
        undisturbed = History([loss for loss, _ in steps], [norm for _, norm in steps], first.parameters())
        first.engine.close()
        second = Run(case)
        with torch.no_grad():
            for p in second.model.parameters():
                p.add_(1.0) if p.numel() else None
        state = second.engine.load(Path(folder))
        rest = [second.step(number) for number in range(3, STEPS)]
        found = History([loss for loss, _ in rest], [norm for _, norm in rest], second.parameters())
        second.engine.close()
    return undisturbed, found, state


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_resuming_changes_nothing(run_ranks: Any, tmp_path: Path, stage: int, adapters: bool) -> None:
    case = Case(stage, LAYOUTS["sp2 ulysses"], "x+O", adapters)
    for undisturbed, found, state in run_ranks(2, resumed, case, str(tmp_path)):
        assert state["step"] == 3
        assert found.losses == undisturbed.losses[3:]
        assert found.norms == undisturbed.norms[3:]
        assert all(torch.equal(found.parameters[name], p) for name, p in undisturbed.parameters.items())


def gathers(memory: str) -> list[int]:
    """Count gathers in a forward, and in it and its backward, where nothing is kept from one use to the next."""
    from deepspeed.runtime.zero import partition_parameters

    options = dict.fromkeys(("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"), 0)
    options = {f"stage3_{name}": value for name, value in {**options, "param_persistence_threshold": 0}.items()}
    gather, made = partition_parameters._dist_allgather_fn, [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        return gather(*args, **kwargs)

    counts: list[int] = []
    with launched():
        run = Run(Case(3, LAYOUTS["sp2 ulysses"], memory), options=options)
        partition_parameters._dist_allgather_fn = counting
        try:
            for _ in range(2):
                with run.engine.accumulating(last=True):
                    made[0] = 0
                    loss = run.module(**run.handle.shard(micro_batches(1, 1)[0])).loss
                    counts = [made[0]]
                    run.engine.backward(loss)
                    counts.append(made[0])
        finally:
            partition_parameters._dist_allgather_fn = gather
        run.engine.close()
    return counts


@pytest.mark.parametrize("memory", ["plain", "auto", "x+O", "compiled"])
def test_a_layer_is_gathered_once_per_pass(run_ranks: Any, memory: str) -> None:
    forward = backward = 2 + 3  # layers; embedding, norm and head
    for counts in run_ranks(2, gathers, memory):
        assert counts == [forward, forward + backward]


def test_a_layer_that_is_rebuilt_is_gathered_once_more(run_ranks: Any) -> None:
    for counts in run_ranks(2, gathers, "x, none"):
        assert counts == [5, 5 + 5 + 1]


def own_loop(stage: int, layout: Layout, through_mpu: bool) -> History:
    """Train as users of DeepSpeed do, with its own way of accumulating."""
    import deepspeed

    losses, norms, accumulation = [], [], 2
    with launched():
        model = build()
        handle = longspan.prepare(model, layout.size, ring_degree=layout.ring, memory=MEMORIES["x+O"])
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer_of(model.parameters()),
            mpu=MPU(handle.mesh) if through_mpu else None,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": MAX_NORM,
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
                "zero_allow_untested_optimizer": True,
            },
        )
        assert engine.train_batch_size() == accumulation * (handle.mesh.data.size if through_mpu else layout.world)
        replicas, replica = handle.mesh.data.size, handle.mesh.data.rank
        for step in range(STEPS):
            batches, total = micro_batches(step, accumulation * replicas), 0.0
            for batch in batches[replica::replicas]:
                loss = engine(**handle.shard(batch, num_items=targets(batches))).loss
                engine.backward(loss, scale_wrt_gas=False)
                engine.step()
                total += loss.item()
            losses.append(total)
            norms.append(float(engine.get_global_grad_norm() or 0.0))
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine.destroy()
    return History(losses, norms, parameters)


@pytest.mark.matrix
@pytest.mark.parametrize("through_mpu", [True, False])
@pytest.mark.parametrize("layout", ["sp2 ring", "dp2 x sp2"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_own_loop(run_ranks: Any, stage: int, layout: str, through_mpu: bool) -> None:
    where = LAYOUTS[layout]
    expected = one_process(2 * where.world // where.size)
    for found in run_ranks(where.world, own_loop, stage, where, through_mpu):
        check(History(found.losses, found.norms if stage else expected.norms, found.parameters), expected)


def refusals() -> list[str]:
    """Initialise in ways that would not be exact; return what was said."""
    import deepspeed
    from deepspeed.utils import groups

    class OwnMPU(MPU):
        """Counts the ranks of a sequence as DeepSpeed's own does."""

        def get_sequence_parallel_world_size(self) -> int:
            return int(self.mesh.sequence.size)

    def said(model: Any, mpu: Any, stage: int = 1) -> str:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
            "zero_allow_untested_optimizer": True,
        }
        with pytest.raises((TopologyError, ModelError)) as caught:  # noqa: PT012  (either may refuse)
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer_of(p for p in model.parameters() if p.requires_grad),
                config=config,
                mpu=mpu,
            )
            engine(**handle.shard(micro_batches(0, 1)[0]))
        return str(caught.value)

    with launched():
        model = build()
        handle = longspan.prepare(model, 2, grad_reduction="sum")
        messages = [said(model, MPU(handle.mesh))]
        handle.remove()
        assert "set_deepspeed_parallelism" not in vars(model)
        handle = longspan.prepare(model, 2)
        messages.append(said(model, OwnMPU(handle.mesh)))
        groups.mpu = None
        model = model_of(adapters=True)
        handle = longspan.prepare(model, 2, memory=MEMORIES["x+O"])
        messages.append(said(model, MPU(handle.mesh), 3))
        with pytest.raises(ModelError, match="leave reduce_gradients out"):
            handle.reduce_gradients()
        engine = Zero(1)
        double = build().double()
        with pytest.raises(ModelError, match="the model's parameters are float64"):
            engine.wrap(double, longspan.prepare(double, 2))
        module = engine.wrap(build(), handle)
        with pytest.raises(TrainingError, match="adopt"):
            module()
        with pytest.raises(TrainingError, match="clips while it steps"):
            engine.clip_grad_norm(1.0)
        with pytest.raises(ConfigError, match="steps itself"):
            choose_stepping(optimizer_of(module.parameters()), engine, True, None)
    return messages


def test_what_would_not_be_exact_is_refused(run_ranks: Any) -> None:
    for total, own, frozen in run_ranks(2, refusals):
        assert "grad_reduction='mean'" in total
        assert "divide the gradients of 2 processes by 1 at stages 0 to 2" in own and "MPU(handle.mesh)" in own
        assert "enable_input_require_grads() before deepspeed.initialize" in frozen


def test_versions_and_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [build_engine(f"zero-{stage}", 2).name for stage in range(4)] == ["zero-0", "zero-1", "zero-2", "zero-3"]
    with pytest.raises(ConfigError, match="stages 0 to 3, not 4"):
        Zero(4)
    with pytest.raises(ConfigError, match="float64 is not served"):
        Zero(1, torch.float64)
    with pytest.raises(ConfigError, match="zero-1 to zero-3"):
        Zero(0, torch.bfloat16)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.18.2")
    with pytest.raises(ConfigError, match=r"need deepspeed >= 0.19.8, < 0.20, found 0.18.2"):
        Zero(1)


def all_tensors() -> list[Tensor]:
    """Return all tensors of this process, and their gradients; what compiling left without memory is not counted."""
    gc.collect()
    kinds = (Tensor, FakeTensor, FunctionalTensor)
    found = [o for o in gc.get_objects() if issubclass(type(o), kinds[0]) and not issubclass(type(o), kinds[1:])]
    tensors = [t for t in found if t.device.type == "cpu"]
    return tensors + [t.grad for t in tensors if t.is_leaf and t.grad is not None]


def held_bytes(others: list[Tensor]) -> int:
    """Add up the memory of all tensors but those that were there before."""
    apart = {t.untyped_storage().data_ptr() for t in others}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in all_tensors()}
    return sum(size for at, size in storages.items() if at not in apart)


def settled_bytes(others: list[Tensor]) -> int:
    """Add up that memory once gloo's threads have let go of what they sent last, which they do after `wait` returns."""
    readings = []
    for _ in range(3):
        readings.append(held_bytes(others))
        time.sleep(0.1)
    return min(readings)


def holding(stage: int, bf16: bool) -> tuple[dict[str, float], dict[str, float], Any]:
    """Train two steps of two micro-batches with small buffers; return what is held when, and what is planned."""
    options: dict[str, Any] = {"reduce_bucket_size": 1000}
    if stage == 3:
        options |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
    compute = torch.bfloat16 if bf16 and stage else None
    with launched():
        before = all_tensors()
        engine = Zero(stage, compute, options=options)
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
        )
        model: Any = LlamaForCausalLM(config)
        model = model.to(torch.bfloat16 if bf16 and not stage else torch.float32).train()
        count = sum(p.numel() for p in model.parameters())
        handle = longspan.prepare(model, 2, memory=Memory())
        told: list[Any] = []
        with patch.object(handle, "held_by", lambda *held: told.append(held)):
            module = engine.wrap(model, handle)
        engine.adopt(torch.optim.AdamW(module.parameters(), 1e-3), MAX_NORM)
        found: dict[str, float] = {}
        ids = torch.arange(16)[None]
        for second in (False, True):
            for last in (False, True):
                part = handle.shard({"input_ids": ids, "labels": ids})
                with engine.accumulating(last):
                    engine.backward(module(**part).loss)
                del part
            if second:
                found["after backward"] = settled_bytes(before) / count
            engine.step()
        found["after step"] = settled_bytes(before) / count
        engine.close()
        handle.remove()
        weights = count * (2 if bf16 else 4)
        del engine, module, model, handle
        found["closed"] = settled_bytes(before) / weights
    ((name, optimizer),) = told
    cluster = Cluster(find_machine("cpu"), 2, 2, GIB, GIB)
    ledger = Ledger(Setup(model_shape(config), cluster, name, optimizer, 2, 1, 16, itemsize=2 if bf16 else 4))
    causes = ("parameters", "optimizer", "gradients")
    moments = {"after step": ledger.moments[0], "after backward": ledger.moments[-1]}
    return found, {w: sum(m.causes[c] for c in causes) / count for w, m in moments.items()}, optimizer


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_planned_is_what_is_held(run_ranks: Any, stage: int, bf16: bool) -> None:
    """Bytes per parameter on two ranks, between steps and once gradients are there."""
    found, planned, optimizer = run_ranks(2, holding, stage, bf16)[0]
    assert found["after step"] == pytest.approx(planned["after step"], abs=0.1)
    assert found["closed"] < (0.51 if stage == 3 else 0.01), "of the weights' bytes: this rank's part of them, or none"
    # float32 gradients of stage 0 are made within the step; those of the first stage in float32 are divided in backward
    apart = {(0, True): 4, (1, False): 2}.get((stage, bf16), 0)
    assert found["after backward"] == pytest.approx(planned["after backward"] - apart, abs=0.1)
    if stage == 3 and bf16:
        assert planned["after step"] * 2 == pytest.approx(18)
    assert optimizer.name == "adamw"


class Scaled(torch.optim.AdamW):
    """Divides each parameter's gradient by its own norm: not a matter of elements alone."""


def adopting(optimizer: type[torch.optim.Optimizer]) -> str:
    with launched():
        engine = Zero(1)
        model = build()
        handle = longspan.prepare(model, 2)
        module = engine.wrap(model, handle)
        try:
            engine.adopt(optimizer(module.parameters(), lr=0.1), None)  # type: ignore[call-arg]
        except ConfigError as error:
            return str(error)
        engine.close()
        return ""


def test_optimizers_that_need_whole_parameters_are_refused(run_ranks: Any) -> None:
    """DeepSpeed steps flat slices of many parameters."""
    assert run_ranks(2, adopting, torch.optim.AdamW) == ["", ""]
    for kind in (torch.optim.Adafactor, Scaled):
        for said in run_ranks(2, adopting, kind):
            assert f"zero-1 cannot step {kind.__name__}" in said and "torch.optim.AdamW" in said and "fsdp2" in said


def skipping(stage: int) -> tuple[bool, float, bool, bool]:
    """Overflow a step; return whether DeepSpeed says it stepped, the norm, and whether weights moved or are lost."""
    with launched():
        run = Run(Case(stage, LAYOUTS["sp2 ulysses"]))
        before = run.parameters()
        batch = micro_batches(0, 1)[0]
        run.stepping.begin(0.2)
        with run.engine.accumulating(last=True):
            run.engine.backward(run.module(**run.handle.shard(batch)).loss * float("inf"))
        norm = float(run.stepping.norm())
        after = run.parameters()
        moved = any(not torch.equal(after[n], p) for n, p in before.items())
        told = run.stepping.applied_early
        run.engine.close()
        return told, norm, moved, math.isfinite(norm)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_skipped_step_is_not_called_applied(run_ranks: Any, stage: int) -> None:
    for told, _, moved, finite in run_ranks(2, skipping, stage):
        assert told == moved and not finite


def closed(case: Case, broken: str) -> tuple[dict[str, str], bool]:
    """Close after a step, or after one that failed; return what each later call says, and whether the model is free."""
    with launched():
        run = Run(case)
        run.step(0)
        layer = run.model.model.layers[-1]
        part = run.handle.shard(micro_batches(0, 1)[0])
        weight = run.model.lm_head.weight
        if broken == "forward":
            with patch.object(layer.mlp, "forward", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
                run.module(**part)
        if broken == "gather":
            weight.ds_status = type(weight.ds_status).INFLIGHT
        run.engine.close()
        run.engine.close()
        said: dict[str, str] = {}
        calls: dict[str, Any] = {
            "forward": lambda: run.module(**part),
            "accumulating": lambda: run.engine.accumulating(True).__enter__(),
            "backward": lambda: run.engine.backward(torch.ones(())),
            "step": run.engine.step,
            "whole": lambda: run.engine.whole(weight),
            "gradient": lambda: run.engine.gradient(weight),
            "save": lambda: run.engine.save(Path("nowhere"), {}),
            "load": lambda: run.engine.load(Path("nowhere")),
        }
        for name, call in calls.items():
            with pytest.raises(TrainingError) as error:
                call()
            said[name] = str(error.value)
        assert not run.engine.applied and not run.stepping.applied_early
        assert len(run.stepping.optimizer.param_groups) == 1
        run.handle.remove()
        if case.stage < 3:
            ids = torch.arange(8)[None]
            run.model(input_ids=ids, labels=ids).loss.backward()
        return said, all(p.grad is not None for p in run.model.parameters())


@pytest.mark.parametrize(
    ("stage", "broken"), [(0, ""), (1, ""), (1, "forward"), (2, "forward"), (3, ""), (3, "forward"), (3, "gather")]
)
def test_what_is_closed_says_so_and_leaves_the_model(run_ranks: Any, stage: int, broken: str) -> None:
    for said, differentiates in run_ranks(2, closed, Case(stage, LAYOUTS["sp2 ulysses"]), broken):
        assert len(set(said.values())) == 1 and "close" in said["forward"], said
        assert differentiates == (stage < 3)

"""Plans of models with adapters: frozen weights have no gradients and no optimizer state, packed ones are small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import longspan
from longspan.config import AdapterConfig, parse_config
from longspan.errors import ConfigError
from longspan.integrations.adapters import add_adapter
from longspan.integrations.models import build_model
from longspan.integrations.presets import preset_config
from longspan.integrations.quantize import dequantize_layers, quantize_layers
from longspan.integrations.shapes import model_shape
from longspan.integrations.transformers.automatic import _weight_bytes
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB, Cluster
from longspan.plan.memory import Ledger, Moment
from longspan.plan.setup import Optimizer, Setup
from longspan.stream.quantized import quantised, whole_weight
from longspan.train.metrics import model_work
from longspan.train.trainee import assemble

pytest.importorskip("peft")


def adapted(dtype: torch.dtype = torch.float32, quantization: str = "none", **adapter: Any) -> Any:
    model = AutoModelForCausalLM.from_config(preset_config("tiny-llama"), dtype=dtype)
    quantize_layers(model, quantization, torch.device("cpu"))
    return add_adapter(model, AdapterConfig(kind="lora", rank=4, **adapter), seed=0)


def numbers(model: nn.Module, trained: bool) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


def setup_of(model: Any, engine: str = "ddp", gpus: int = 1, optimizer: Optimizer | None = None) -> Setup:
    cluster = Cluster(find_machine("h200"), gpus, gpus, 141 * GIB, 512 * GIB)
    return Setup(model_shape(model), cluster, engine, optimizer or Optimizer.adamw(4), 1, 1, 512, itemsize=4)


def moment(ledger: Ledger, name: str) -> Moment:
    return next(m for m in ledger.moments if m.name == name)


@pytest.mark.parametrize("adapter", [{}, {"target_modules": ["v_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_gradients_and_states_of_adapters_alone(adapter: dict[str, Any]) -> None:
    model = adapted(**adapter)
    trained, whole = numbers(model, trained=True), numbers(model, trained=False)
    shape = model_shape(model)
    assert (shape.trained, shape.parameters) == (trained, whole)
    head = sum(p.numel() for p in model.get_output_embeddings().parameters() if p.requires_grad)
    assert shape.head_trained == head
    ledger = Ledger(setup_of(model))
    step = moment(ledger, "step").causes
    assert step["optimizer"] == 8 * trained
    assert step["gradients"] == 4 * trained
    assert step["parameters"] == 4 * whole
    assert moment(ledger, "forward").causes["optimizer"] == 8 * trained
    backward = next(m for m in ledger.moments if m.layer == 0).causes
    later = sum(layer.trained for layer in shape.layers[1:])
    assert backward["gradients"] == 4 * later + 4 * head
    assert backward["gradient buffers"] == 8 * shape.layers[0].trained
    full = Ledger(setup_of(AutoModelForCausalLM.from_config(preset_config("tiny-llama"))))
    assert moment(full, "loss").total > moment(ledger, "loss").total


@pytest.mark.parametrize(("kind", "share"), [("int8", 1.15), ("nf4", 0.6)])
def test_packed_weights_are_counted_as_packed(kind: str, share: float) -> None:
    pytest.importorskip({"int8": "torchao", "nf4": "bitsandbytes"}[kind])
    model, plain = adapted(torch.bfloat16, kind), adapted(torch.bfloat16)
    shape, wanted = model_shape(model), model_shape(plain)
    layer = shape.layers[0]
    assert layer.packed == sum(
        linear.in_features * linear.out_features
        for linear in plain.get_base_model().model.layers[0].modules()
        if isinstance(linear, nn.Linear) and linear.out_features > 4 < linear.in_features
    )
    assert 0.4 * layer.packed < layer.packed_bytes < share * layer.packed
    same = [replace(la, packed=0, packed_bytes=0) for la in shape.layers]
    assert same == list(wanted.layers)
    packed = sum(la.packed for la in shape.layers)
    saved = 2 * packed - sum(la.packed_bytes for la in shape.layers)
    assert _weight_bytes(plain, wanted) * wanted.parameters == 2 * numbers(plain, trained=False)
    assert _weight_bytes(model, shape) * shape.parameters == pytest.approx(2 * wanted.parameters - saved)
    setup = replace(setup_of(model, "fsdp2", 2), itemsize=2)
    own, other = Ledger(setup), Ledger(replace(setup_of(plain, "fsdp2", 2), itemsize=2))
    assert moment(own, "forward").causes["unpacked weights"] == 2 * layer.packed
    assert "unpacked weights" not in moment(other, "forward").causes
    gathered = [moment(ledger, "forward").causes["gathered parameters"] for ledger in (own, other)]
    assert gathered[1] - gathered[0] == 2 * (2 * layer.packed - layer.packed_bytes)
    work, whole = model_work(model, model.config), model_work(plain, plain.config)
    assert work == whole


def test_work_of_frozen_weights() -> None:
    model = adapted()
    work: Any = model_work(model, model.config)
    trained = numbers(model, trained=True)
    assert work.parameters - work.frozen == trained
    assert work.flops([1]) == 6 * trained + 4 * work.frozen + 3 * work.attention_width


def test_a_runs_optimizer_is_planned_for() -> None:
    model = adapted()
    automatic: Any = longspan.prepare(model, 1).automatic

    def planned() -> Optimizer:
        return automatic._task(model.get_base_model(), False).optimizers[0]

    trained = numbers(model, trained=True)
    assert planned() == Optimizer.held("adamw", 4, 4.0) == Optimizer.adamw(4)
    automatic.plan(model.get_base_model(), 1, 64)
    automatic.expect("adamw-host")
    assert not automatic.plans
    assert (planned().host_bytes, planned().state_bytes, planned().gradient_bytes) == (12, 0, 4)
    setup = next(automatic._task(model.get_base_model(), False).setups(64, planned()))
    assert setup.engine == "ddp" and setup.optimizer.gradient_bytes == 4  # as the run does it
    assert Ledger(setup).host == {"optimizer": 12 * trained}
    automatic.expect("adamw8bit")
    assert planned().state_bytes == pytest.approx(2.07)
    automatic.expect("adamw", in_backward=True)
    assert planned().in_backward and planned().state_bytes == 8
    with pytest.raises(ConfigError, match="Did you mean adamw8bit"):
        automatic.expect("adam8bit")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_packing_and_back(kind: str) -> None:
    pytest.importorskip({"int8": "torchao", "nf4": "bitsandbytes"}[kind])
    model = AutoModelForCausalLM.from_config(preset_config("tiny-llama"), dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    quantize_layers(model, kind, torch.device("cpu"))
    packed = {name: whole_weight(m) for name, m in model.named_modules() if quantised(m)}
    assert len(packed) == 7 * len(model.model.layers)
    dequantize_layers(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    for name, p in after.items():
        error = float((p - before[name]).norm() / before[name].norm())
        stood_for = packed.get(name.removesuffix(".weight"))
        assert (0 < error < 0.2 and torch.equal(p, stood_for)) if stood_for is not None else error == 0


def test_the_training_loop_plans_for_its_optimizer() -> None:
    settings = {"name": "tiny-llama", "init": "random"}
    config = parse_config(
        {
            "model": settings,
            "data": {"files": "a"},
            "sequence_length": 64,
            "max_steps": 1,
            "output_dir": "x",
            "adapter": {"kind": "lora", "rank": 3},
            "optimizer": {"kind": "adamw-host", "step_in_backward": True, "clip": "previous"},
        }
    )
    trainee: Any = assemble(config, lambda blank: build_model(config.model, 0), torch.device("cpu"))
    assert (trainee.handle.automatic.kind, trainee.handle.automatic.in_backward) == ("adamw-host", True)
    stepped = {id(p) for group in trainee.stepping.optimizer.param_groups for p in group["params"]}
    lora = {id(p) for name, p in trainee.model.named_parameters() if "lora_" in name}
    assert stepped == lora and len(lora) == 2 * 7 * len(trainee.handle.layers)

"""Adapters of PEFT inside streamed layers, and layers whose settings or weights change between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from dense import TOLERANCE, apart, relative
from longspan.check.float64 import float64_throughout
from longspan.errors import TrainingError
from longspan.keep import Keep, Memory
from models import Rows, build
from pool import RunRanks
from steps import Case, adapted, all_errors, gradients, make, truth_of

pytest.importorskip("peft")
pytestmark = pytest.mark.dist

ROWS = Rows([[9, 1, 13], [4, 8]], seed=1)
KEEPS: dict[str, Any] = {"x+O+KV": Keep.X_O_KV, "x+O": Keep.X_O, "x, none": (Keep.X, Keep.NONE)}


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_compiled_halves_with_adapters(run_ranks: RunRanks, engine: str) -> None:
    case = Case("lora", (2, 1), Memory(4, (Keep.X_O, Keep.NONE), "eager"), engine, "packed")
    for wrong in run_ranks(2, all_errors, [case]):
        assert not wrong


def partly_adapted(memory: Memory, **config: Any) -> None:
    """Adapters in some layers or projections only: what lies before them needs no gradient."""
    with float64_throughout():
        model = adapted(build("llama"), **config)
        truth = truth_of(model, [[ROWS]])
        handle = longspan.prepare(model, 1, memory=memory)
        out = model(**handle.shard(ROWS.batch()))
        out.loss.backward()
    errors = {name: relative(g, truth.gradients[name]) for name, g in gradients(model).items()}
    assert len(errors) in (2, 4) and max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("keep", KEEPS)
def test_few_adapters(run_ranks: RunRanks, keep: str) -> None:
    for only in ({"layers_to_transform": [1]}, {"layers_to_transform": [0]}, {"target_modules": ["down_proj"]}):
        config = {"target_modules": ["v_proj"], **only}
        run_ranks(1, partly_adapted, Memory(4, KEEPS[keep]), **config)


def test_few_adapters_in_compiled_halves(run_ranks: RunRanks) -> None:
    run_ranks(1, partly_adapted, Memory(4, Keep.X_O, "eager"), target_modules=["v_proj"])


def two_adapters() -> Any:
    """Build a model with two adapters, of which the first is active."""
    from peft import LoraConfig

    model = adapted(build("llama"))
    model.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"]))
    model.double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "other" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    model.set_adapter("default")
    return model


def _unfreeze(model: Any) -> None:
    """Train the first adapter, active or not; as in plain models, what is frozen in backward gets nothing."""
    for name, p in model.named_parameters():
        if "default" in name:
            p.requires_grad_()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another adapter": lambda model: (model.set_adapter("other"), _unfreeze(model)),
    "no adapter": lambda model: (model.base_model.disable_adapter_layers(), _unfreeze(model)),
    "eval": lambda model: model.eval(),
    "frozen": lambda model: [p.requires_grad_(False) for n, p in model.named_parameters() if "layers.1" in n],
    "scaled": lambda model: [
        m.scaling.update(default=9.0) for m in model.modules() if isinstance(getattr(m, "scaling", None), dict)
    ],
}


def changed_case(memory: Memory, change: str) -> None:
    """Change a model between forward and backward: backward is that of the forward, and the change stays."""
    with float64_throughout():
        model = two_adapters()
        for layer in model.base_model.model.model.layers:
            layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, _HalfInTraining())
        truth = truth_of(model, [[ROWS]])
        handle = longspan.prepare(model, 1, memory=memory)
        loss = model(**handle.shard(ROWS.batch())).loss
        CHANGES[change](model)
        names = [name for name, p in model.named_parameters() if p.requires_grad and "default" in name]
        before = _state(model)
        loss.backward()
        assert _state(model) == before
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert sorted(found) == sorted(names) and len(names) == (6 if change == "frozen" else 12)
    errors = {name: relative(found[name], truth.gradients[name]) for name in names}
    assert max(errors.values()) <= TOLERANCE, errors


class _HalfInTraining(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 if self.training else 1.0)


def _state(model: nn.Module) -> list[Any]:
    adapters = [
        (m.training, str(vars(m).get("_active_adapter")), vars(m).get("_disable_adapters")) for m in model.modules()
    ]
    scales = [dict(m.scaling) for m in model.modules() if isinstance(getattr(m, "scaling", None), dict)]  # type: ignore[call-overload]
    return [adapters, scales, [p.requires_grad for p in model.parameters()]]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_forward_does_not_reach_backward(run_ranks: RunRanks, change: str) -> None:
    for keep in KEEPS.values():
        run_ranks(1, changed_case, Memory(4, keep), change)


def test_a_change_does_not_reach_compiled_halves(run_ranks: RunRanks) -> None:
    run_ranks(1, changed_case, Memory(4, Keep.X_O, "eager"), "another adapter")


def _grow(model: Any) -> None:
    with torch.no_grad():
        model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight.mul_(1.01)


SPOILED: dict[str, Callable[[Any], Any]] = {
    "merged": lambda model: model.merge_adapter(),
    "stepped": _grow,
    "deleted": lambda model: model.delete_adapter("other"),
}


def spoiled_case(spoil: str) -> None:
    for keep in KEEPS.values():
        model = two_adapters()
        handle = longspan.prepare(model, 1, memory=Memory(4, keep))
        loss = model(**handle.shard(ROWS.batch())).loss
        SPOILED[spoil](model)
        with pytest.raises(TrainingError, match="changed or replaced between forward and backward"):
            loss.backward()


@pytest.mark.parametrize("spoil", SPOILED)
def test_other_weights_in_backward_are_refused(run_ranks: RunRanks, spoil: str) -> None:
    run_ranks(1, spoiled_case, spoil)


def merged_case() -> None:
    """A model that was streamed merges its adapters like any other, and computes the same."""
    with float64_throughout():
        model = make("lora")
        handle = longspan.prepare(model, 1, memory=Memory(4, Keep.X_O))
        loss = model(**handle.shard(ROWS.batch())).loss
        loss.backward()
        handle.remove()
        merged = model.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_modules())
        again = longspan.prepare(merged, 1, memory=Memory(4, Keep.X_O))
        assert apart(float(merged(**again.shard(ROWS.batch())).loss), float(loss.detach())) < TOLERANCE


def test_adapters_merge_after_removal(run_ranks: RunRanks) -> None:
    run_ranks(1, merged_case)


def shared_graphs_case() -> None:
    """Layers that differ in their index alone share compiled graphs; another active adapter has its own."""
    model = two_adapters()
    handle = longspan.prepare(model, 1, memory=Memory(4, Keep.X_O_KV, "eager"))
    plain = longspan.prepare(twin := two_adapters(), 1)
    losses = []
    for name in ("default", "other"):
        for each in (model, twin):
            each.set_adapter(name)
            each.requires_grad_(False)
        losses.append(model(**handle.shard(Rows([[16]]).batch())).loss)
        assert apart(float(losses[-1]), float(twin(**plain.shard(Rows([[16]]).batch())).loss)) < 1e-6
        assert handle.compiler is not None and len(handle.compiler.graphs) == 2 * len(losses)
    assert abs(float(losses[0] - losses[1])) > 1e-3


def test_layers_with_adapters_share_compiled_graphs(run_ranks: RunRanks) -> None:
    run_ranks(1, shared_graphs_case)

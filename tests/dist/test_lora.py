"""Adapters in every part of a model: exact, without work for what is frozen, and saved from any engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from dense import TOLERANCE, relative
from longspan.check.float64 import float64_throughout
from longspan.engines import build_engine
from longspan.integrations.adapters import write_adapter
from longspan.keep import Keep, Memory
from longspan.train.checkpoint import full_state, save_model
from models import Rows, build
from pool import RunRanks
from steps import adapted, gradients, truth_of

pytest.importorskip("peft")
pytestmark = pytest.mark.dist

ROWS = Rows([[9, 1, 13], [4, 8]], seed=1)
KEEPS: dict[str, Memory] = {
    "graph": Memory(),
    "x+O": Memory(4, Keep.X_O),
    "x, none": Memory(4, (Keep.X, Keep.NONE)),
    "compiled": Memory(4, Keep.X_O, "eager"),
}
WHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "all linear": ("llama", {"target_modules": "all-linear"}),
    "tied head": ("llama-tied", {"target_modules": ["v_proj", "lm_head"]}),
    "tied embedding": ("llama-tied", {"target_modules": ["v_proj", "embed_tokens"]}),
    "whole head": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "whole head, tied": ("llama-tied", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "whole embedding": ("llama", {"target_modules": ["down_proj"], "modules_to_save": ["embed_tokens"]}),
    "whole norm": ("llama", {"target_modules": ["down_proj"], "modules_to_save": ["input_layernorm"]}),
}


def adapted_case(where: str, memory: Memory, ranks: int = 1, engine: str = "single") -> None:
    with float64_throughout():
        family, config = WHERE[where]
        model = adapted(build(family), **config)
        truth = truth_of(model, [[ROWS]])
        wrapping = build_engine(engine, ranks)
        handle = longspan.prepare(model, ranks, memory=memory, grad_reduction=wrapping.grad_reduction)
        module = wrapping.wrap(model, handle)
        with wrapping.accumulating(last=True):
            out = module(**handle.shard(ROWS.batch()))
            out.loss.backward()
        wrapping.reduce()
    assert abs(float(out.loss.detach()) - truth.loss) < TOLERANCE
    found = gradients(model)
    assert found.keys() == truth.gradients.keys()
    assert all(float(g.abs().max()) > 1e-6 for g in truth.gradients.values())
    errors = {name: relative(g, truth.gradients[name]) for name, g in found.items()}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("where", WHERE)
def test_adapters_anywhere(run_ranks: RunRanks, where: str, keep: str) -> None:
    run_ranks(1, adapted_case, where, KEEPS[keep])


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("where", ["head", "whole head, tied", "whole embedding"])
def test_adapters_anywhere_under_engines(run_ranks: RunRanks, where: str, engine: str) -> None:
    run_ranks(2, adapted_case, where, KEEPS["x, none"], 2, engine)


class Products(TorchDispatchMode):
    """Remembers the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.shapes.append(tuple(out.shape[-2:]))
        return out


def products_case(memory: Memory, frozen: bool) -> list[tuple[int, ...]]:
    """Return the products of a step that have the shape of some weight of the model itself, which a gradient has."""
    model = build("llama", torch.float32)
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    weights |= {shape[::-1] for shape in weights}
    if frozen:
        model = adapted(model, target_modules=["q_proj", "down_proj", "lm_head"]).float()
    handle = longspan.prepare(model, 1, memory=memory)
    part = handle.shard(Rows([[23]]).batch())
    loss = model(**part).loss
    with Products() as products:
        loss.backward()
    with Products() as forward:  # makes gradients of the head, as the loss runs
        model(**part)
    return [shape for shape in products.shapes + forward.shapes if shape in weights]


@pytest.mark.parametrize("keep", ["x+O", "x, none"])
def test_frozen_weights_cost_no_products(run_ranks: RunRanks, keep: str) -> None:
    (wasted,) = run_ranks(1, products_case, KEEPS[keep], True)
    (useful,) = run_ranks(1, products_case, KEEPS[keep], False)
    assert wasted == []
    assert len(useful) >= 2 * 7 * 6 + 1  # each matrix of two layers, in six tiles, and the head


def _dropping(rows: Rows, tile_tokens: int | None, keep: Keep | tuple[Keep, ...]) -> tuple[Any, Any]:
    model = adapted(build("llama"), lora_dropout=0.4)
    memory = Memory() if tile_tokens is None else Memory(tile_tokens, keep)
    return model, longspan.prepare(model, 1, memory=memory)


def dropout_case(keep: Keep | tuple[Keep, ...]) -> None:
    """One tile draws what the plain layers draw; several draw again in backward what they drew in forward."""
    with float64_throughout():
        results = []
        for tile in (None, 64):
            model, handle = _dropping(ROWS, tile, keep)
            torch.manual_seed(5)
            model(**handle.shard(ROWS.batch())).loss.backward()
            results.append(gradients(model))
        plain, streamed = results
        assert max(relative(streamed[name], g) for name, g in plain.items()) <= TOLERANCE

        model, handle = _dropping(ROWS, 4, keep)
        trained = [p for p in model.parameters() if p.requires_grad]

        def loss(step: float) -> Tensor:
            with torch.no_grad():
                for p, d in zip(trained, directions, strict=True):
                    p += step * d
            torch.manual_seed(5)
            return model(**handle.shard(ROWS.batch())).loss

        directions = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(trained)]
        loss(0.0).backward()
        slope = sum(float((p.grad * d).sum()) for p, d in zip(trained, directions, strict=True))
        small = 1e-7
        with torch.no_grad():
            after, before = float(loss(small)), float(loss(-2 * small))
        found = (after - before) / (2 * small)
        assert abs(found - slope) <= 1e-6 * abs(slope), (found, slope)
        torch.manual_seed(6)
        assert abs(float(model(**handle.shard(ROWS.batch())).loss.detach()) - before) > 1e-4, "dropout is at work"


@pytest.mark.parametrize("keep", [Keep.X_O_KV, Keep.X_O, (Keep.X, Keep.NONE)], ids=str)
def test_dropout_of_adapters_is_replayed(run_ranks: RunRanks, keep: Any) -> None:
    run_ranks(1, dropout_case, keep)


def saving_case(folder: str) -> None:
    """Shard a model with adapters and a whole head, and save what is trained: it is that of one process."""
    from peft import PeftModel

    model = adapted(build("llama"), modules_to_save=["lm_head"])
    whole = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    engine = build_engine("fsdp2", 2)
    handle = longspan.prepare(model, 2, grad_reduction=engine.grad_reduction)
    engine.wrap(model, handle)
    with Gathered() as gathered:
        state = full_state(model, keep=dist.get_rank() == 0, trained=True)
    assert len(gathered.numbers) == len(whole) and sum(gathered.numbers) < 2 * sum(p.numel() for p in whole.values())
    if dist.get_rank() == 0:
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[name], p) for name, p in whole.items())
    else:
        assert state == {}
    save_model(model, Path(folder) / "model", lambda into, state: write_adapter(model, into, state), trained=True)
    fresh = PeftModel.from_pretrained(build("llama"), folder + "/model", autocast_adapter_dtype=False)
    loaded = dict(fresh.named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in whole.items())


class Gathered(TorchDispatchMode):
    """Counts what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(func):
            self.numbers.append(out.numel())
        return out


def test_sharded_adapters_are_gathered_alone(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, saving_case, str(tmp_path))

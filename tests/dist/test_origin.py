"""Weights that the first process alone has built: the same run to the bit, without a whole model on any other."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from launched import launched
from longspan.bench.tracked import TrackedBytes
from longspan.config import RunConfig
from longspan.engines import Origin, Zero
from longspan.errors import ModelError
from longspan.evaluate.run import _model
from longspan.evaluate.source import Source
from longspan.integrations.adapters import add_adapter
from longspan.integrations.models import build_model
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import random_model
from longspan.integrations.saved import writer
from longspan.integrations.tokenizer import load_tokenizer
from longspan.train import trainee
from longspan.train.trainee import Trainee, assemble
from pool import RunRanks
from runs import config_of

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model": {"name": "tiny-llama", "init": "random"}},
    "bf16": {"model": {"name": "tiny-llama", "init": "random", "dtype": "bfloat16"}},
    "tied": {"model": {"name": "tiny-qwen3", "init": "random"}},
    "experts": {"model": {"name": "tiny-moe", "init": "random"}},
    "several tables": {"model": {"name": "tiny-gemma3", "init": "random"}},
    "delta nets": {"model": {"name": "tiny-qwen3-next", "init": "random"}},
    "vision": {"model": {"name": "tiny-qwen2.5-vl", "init": "random"}},
    "lora": {
        "model": {"name": "tiny-qwen3", "init": "random", "dtype": "bfloat16"},
        "adapter": {"kind": "lora", "rank": 3, "dropout": 0.3, "modules_to_save": ["norm"]},
    },
    "ddp": {"model": {"name": "tiny-llama", "init": "random"}, "engine": "ddp"},
    "zero-3": {"model": {"name": "tiny-qwen3", "init": "random"}, "engine": "zero-3"},
    "zero-3, mixed": {
        "model": {"name": "tiny-llama", "init": "random"},
        "engine": "zero-3",
        "compute_dtype": "bfloat16",
    },
    "folder": {"model": {"name": "FOLDER"}},
    "folder, converted": {"model": {"name": "FOLDER", "dtype": "bfloat16"}, "sequence_parallel_size": 1},
}


def build(config: RunConfig) -> Callable[[bool], Any]:
    return lambda blank: build_model(config.model, config.seed, None, blank)


def whole(config: RunConfig, build: Callable[[bool], Any], *rest: Any) -> tuple[nn.Module, None]:
    """Build the whole model, as every process did before there was an origin."""
    return add_adapter(build(False), config.adapter, config.seed).train(), None


def numbers(made: Trainee) -> dict[str, Tensor]:
    """Return all that a run begins with, the loss and gradients of a step, and the weights after it."""
    model, engine = made.model, made.engine
    found: dict[str, Tensor] = {"random numbers": torch.get_rng_state()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter.requires_grad == (not is_frozen(name, model))
        found[name] = engine.whole(parameter).clone()
        found[f"{name}, here"] = (
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()
        )
        found[f"{name}, tied"] = torch.tensor([n for n, p in enumerate(model.parameters()) if p is parameter])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[f"buffer {name}"] = buffer.clone()
    ids = torch.randint(3, 200, (1, 40), generator=torch.Generator().manual_seed(4))
    made.stepping.begin(0.01)
    with engine.accumulating(last=True):
        loss = made.module(**made.handle.shard({"input_ids": ids, "labels": ids})).loss
        engine.backward(loss)
    engine.reduce()
    found["loss"] = loss.detach()
    for name, parameter in model.named_parameters():
        gradient = engine.gradient(parameter)
        if gradient is not None:
            found[f"gradient {name}"] = gradient
    found["norm"] = made.stepping.norm()
    made.stepping.finish()
    for name, parameter in model.named_parameters():
        found[f"stepped {name}"] = engine.whole(parameter).clone()
    found["modes"] = torch.tensor([module.training for module in model.modules()])
    return found


def begun(config: RunConfig) -> dict[str, Tensor]:
    torch.manual_seed(5)  # where a run that draws no weights goes on
    with around(config.engine), closing(assemble(config, build(config), CPU)) as made:
        return numbers(made)


def around(engine: str) -> AbstractContextManager[None]:
    return launched() if engine.startswith("zero") else nullcontext()


def is_frozen(name: str, model: Any) -> bool:
    return hasattr(model, "peft_config") and "lora_" not in name and "modules_to_save" not in name


def differences(kind: str, folder: str) -> tuple[list[str], int]:
    """Return what differs between a run that comes from an origin and one that every process has built."""
    changes = {**KINDS[kind], "model": {**KINDS[kind]["model"]}}
    if changes["model"]["name"] == "FOLDER":
        changes["model"]["name"] = folder
    config = config_of("out", **changes)
    with patch.object(Origin, "bring", autospec=True, side_effect=Origin.bring) as brought:
        found = begun(config)
    assert brought.called
    with patch.object(trainee, "_build", whole):
        wanted = begun(config)
    assert found.keys() == wanted.keys()
    assert any(name.startswith("gradient") and bool(value.any()) for name, value in wanted.items())
    return [n for n in found if not same(found[n], wanted[n])], sum(name.startswith("buffer") for name in found)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_to_the_bit(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    """Every parameter, shard, tie, buffer, random number, and the loss, gradients and weights of a step."""
    for needed, where in (("peft", "lora"), ("deepspeed", "zero")):
        if where in kind:
            pytest.importorskip(needed)
    random_model(preset_config("tiny-llama"), torch.float32, CPU).save_pretrained(tmp_path)
    for unlike, buffers in run_ranks(2, differences, kind, str(tmp_path)):
        assert unlike == [] and buffers > 0


def recipe() -> Callable[..., Any]:
    """Return what the page on engines shows for a loop of one's own."""
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "origin.bring" in block)
    names: dict[str, Any] = {}
    exec(compile(code, "engines.md", "exec"), names)
    return names["build"]


def own_loop(folder: str) -> tuple[list[str], float]:
    model, handle = recipe()(folder, CPU, 2)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(3, 30)[None]
    loss = model(**handle.shard({"input_ids": ids, "labels": ids})).loss
    loss.backward()
    wanted = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    found = {n: p.full_tensor() for n, p in model.named_parameters()} | dict(model.named_buffers())
    assert found.keys() == wanted.keys() and all(isinstance(p, DTensor) for p in model.parameters())
    return [n for n in found if not same(found[n].detach(), wanted[n].detach())], float(loss.detach())


def test_a_loop_of_ones_own(run_ranks: RunRanks, tmp_path: Path) -> None:
    random_model(preset_config("tiny-llama"), torch.float32, CPU).save_pretrained(tmp_path)
    answers = run_ranks(2, own_loop, str(tmp_path))
    assert [unlike for unlike, _ in answers] == [[], []]
    assert answers[0][1] == answers[1][1] > 1


def converted() -> list[str]:
    """Convert a model, and freeze a part of it, before its weights come; return what differs from doing it after."""
    config = config_of("out", model={"name": "tiny-qwen3", "init": "random"})
    model, plain = build_model(config.model, 0, blank=dist.get_rank() == 1), build_model(config.model, 0)
    origin = Origin(model, CPU)
    for made in (model, plain):
        made.bfloat16().get_input_embeddings().requires_grad_(False)
    origin.bring(model)
    wanted = dict(plain.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return [
        n for n, p in model.named_parameters() if not same(p, wanted[n]) or p.requires_grad != wanted[n].requires_grad
    ]


def test_what_is_done_to_a_model_before_its_weights_come(run_ranks: RunRanks) -> None:
    assert run_ranks(2, converted) == [[], []]


def evaluated(name: str) -> list[str]:
    """Return what differs between a model to evaluate that comes from an origin, and the whole one."""
    source = Source.of(name)
    model, origin = _model(source, "float32", CPU, "fsdp2")
    assert origin is not None and not model.training
    origin.bring(model)
    wanted, found = source.model("float32").state_dict(), model.state_dict()
    assert found.keys() == wanted.keys()
    return [n for n in found if not same(found[n], wanted[n])]


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_to_evaluate(run_ranks: RunRanks, tmp_path: Path, adapted: bool) -> None:
    """Also one that adapters are folded into, which parts its head from its embedding."""
    name = "tiny-qwen3"
    if adapted:
        pytest.importorskip("peft")
        name = str(tmp_path)
        adapter = {"kind": "lora", "rank": 3, "target_modules": ["q_proj", "lm_head"]}
        config = config_of("out", model={"name": "tiny-qwen3", "init": "random"}, adapter=adapter)
        model: Any = add_adapter(build(config)(False), config.adapter, config.seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1) if parameter.requires_grad else None
        writer(model, load_tokenizer("bytes"), config)(tmp_path, model.state_dict())
    assert run_ranks(2, evaluated, name) == [[], []]


SIZES = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 257}


def peaks(engine: str) -> tuple[int, int, int, int]:
    """Return the bytes of a whole model and of a layer, and what building it has taken here at most and at last."""
    config = config_of("out", engine=engine, model={"name": "tiny-llama", "init": "random", "overrides": SIZES})
    blank = build_model(config.model, 0, blank=True)
    sizes = [sum(p.numel() * 4 for p in m.parameters()) for m in (blank, blank.model.layers[0])]
    with around(engine):
        assemble(config, build(config), CPU).close()  # imports what keeps tensors
    with around(engine), patch.object(Zero, "adopt"):  # which makes the optimizer's states
        tracked = TrackedBytes()
        others = tracked.held
        with tracked:
            made = assemble(config, build(config), CPU)
        gc.collect()
        held, peak = tracked.held - others, tracked.peak - others
        del made
    return sizes[0], sizes[1], peak, held


@pytest.mark.parametrize("engine", ["fsdp2", "zero-3"])
def test_no_process_but_the_first_holds_a_whole_model(run_ranks: RunRanks, engine: str) -> None:
    if engine != "fsdp2":
        pytest.importorskip("deepspeed")
    first, second = run_ranks(2, peaks, engine)
    weights, layer, peak, held = second
    slack = 16 * 1024  # a few tokens, tables, the shard that a parameter is copied into
    assert peak < weights / 2 + layer + slack < 0.7 * weights, second
    assert held < weights / 2 + slack, second
    weights, layer, peak, held = first  # which tries layers out beside the whole model
    outside = weights - SIZES["num_hidden_layers"] * layer
    assert peak < weights + layer + 2 * outside and held < weights / 2 + slack, first


class Packed(Tensor):
    """Stands for a weight that is more than its numbers."""


def unlike(what: str) -> str:
    """Build models that differ between processes; return what is said."""
    second = dist.get_rank() == 1
    fields: dict[str, Any] = {"num_hidden_layers": 1}
    if what == "layers" and second:
        fields["num_hidden_layers"] = 2
    if what == "width" and second:
        fields["intermediate_size"] = 173
    config = config_of("out", model={"name": "tiny-llama", "init": "random", "overrides": fields})
    model = build_model(config.model, 0, blank=second)
    if what == "buffers" and second:
        model.model.register_buffer("more", torch.zeros(2))
    if what == "packed" and second:
        model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().as_subclass(Packed))
    with pytest.raises(ModelError) as raised:
        Origin(model, CPU)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("layers", "model.layers.1.input_layernorm.weight is in one of the models only"),
        ("width", r"model.layers.0.mlp.gate_proj.weight is [173, 64] here and [172, 64] on the first"),
        ("buffers", "model.more is in one of the models only"),
        ("packed", "model.norm.weight is packed (Packed)"),
    ],
)
def test_other_models_than_the_first_ones_are_refused_on_all(run_ranks: RunRanks, what: str, said: str) -> None:
    for told in run_ranks(2, unlike, what):
        assert told.startswith(f"Cannot take the first process's weights: process 1 says {said}")


def packed() -> tuple[list[bool], bool, bool]:
    """Build a model whose checkpoint is packed."""
    asked: list[bool] = []

    def build_packed(blank: bool) -> Any:
        asked.append(blank)
        model = build(config)(blank)
        model.config.quantization_config = {"quant_method": "another's"}
        return model

    config = config_of("out")
    model, origin = trainee._build(config, build_packed, CPU, "fsdp2", None)
    return asked, origin is None, any(parameter.is_meta for parameter in model.parameters())


def test_a_packed_checkpoint_is_read_by_every_process(run_ranks: RunRanks) -> None:
    assert run_ranks(2, packed) == [([True, False], True, False)] * 2

"""Quantised weights under adapters: dequantised once per pass of a layer, and exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import longspan
from dense import apart, relative
from longspan.engines import build_engine
from longspan.errors import ModelError
from longspan.keep import Keep, Memory
from longspan.stream import quantized
from longspan.stream.quantized import mixes_tokens, packed_size, quantised, whole_weight
from models import Rows, build
from pool import RunRanks
from steps import gradients

pytest.importorskip("peft")
pytestmark = pytest.mark.dist

ROWS = Rows([[9, 1, 13], [4, 8]], seed=1)
TILES = 6  # of 4 tokens, the longer row's
EXACT = 5e-5
"""fp32: packages quantise no wider types."""


def _nf4(module: nn.Linear) -> None:
    from torchao.quantization import to_nf4

    weight = module.weight.detach()
    module.weight = nn.Parameter(to_nf4(weight, block_size=32, scaler_block_size=32), requires_grad=False)


def _int8(module: nn.Linear) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module, Int8WeightOnlyConfig())
    module.weight.requires_grad_(False)


def _bnb(module: nn.Linear) -> nn.Module:
    bnb: Any = pytest.importorskip("bitsandbytes")
    packed = bnb.nn.Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4")
    packed.support_avx512bf16_for_cpu = False
    packed.weight = bnb.nn.Params4bit(module.weight.detach(), requires_grad=False, quant_type="nf4", module=packed)
    return packed.to("cpu")


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
"""Multiples of 32, as bitsandbytes wants them on CPUs."""

KINDS: dict[str, Callable[[nn.Linear], nn.Module | None]] = {"nf4": _nf4, "int8": _int8, "bnb": _bnb}
PACKAGES = {"nf4": "torchao", "int8": "torchao", "bnb": "bitsandbytes"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(PACKAGES[request.param])
    return request.param


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                yield parent, name, child


def packed_model(kind: str, head: bool = False) -> Any:
    """Build a model with quantised weights and adapters that act."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.is_loaded_in_4bit = kind == "bnb"
    for parent, name, linear in _linears(model if head else model.model.layers):
        made = KINDS[kind](linear)
        if made is not None:
            setattr(parent, name, made)
    found = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for p in found.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    return found.train()


def plain_twin(kind: str, head: bool = False) -> Any:
    """Build the same model with the dequantised weights."""
    model = packed_model(kind, head)
    for parent, name, module in _linears(model):
        if quantised(module):
            weight = whole_weight(module)
            assert weight is not None
            plain = nn.Linear(module.in_features, module.out_features, bias=False)
            plain.weight = nn.Parameter(weight, requires_grad=False)
            setattr(parent, name, plain)
    return model


@contextmanager
def counted() -> Iterator[Counter[nn.Module]]:
    """Count how often each module's weight is dequantised for a pass."""
    count: Counter[nn.Module] = Counter()

    def counting(module: nn.Module) -> Tensor | None:
        weight = whole_weight(module)
        count[module] += weight is not None
        return weight

    with patch.object(quantized, "whole_weight", counting):
        yield count


def step(model: Any, memory: Memory, ranks: int = 1, engine: str = "single") -> tuple[float, dict[str, Tensor]]:
    wrapping = build_engine(engine, ranks)
    handle = longspan.prepare(model, ranks, memory=memory, grad_reduction=wrapping.grad_reduction)
    module = wrapping.wrap(model, handle)
    with wrapping.accumulating(last=True):
        loss = module(**handle.shard(ROWS.batch())).loss
        loss.backward()
    wrapping.reduce()
    return float(loss.detach()), gradients(model)


def packed_case(kind: str, memory: Memory, ranks: int = 1, engine: str = "single", head: bool = False) -> None:
    loss, wanted = step(plain_twin(kind, head), Memory(), ranks)
    model = packed_model(kind, head)
    layers = [m for layer in model.get_base_model().model.layers for m in layer.modules() if quantised(m)]
    assert len(layers) == 14
    kept = [m.weight for m in layers]
    with counted() as count:
        found, grads = step(model, memory, ranks, engine)
    assert all(quantised(m) and "forward" not in vars(m) for m in layers), "the weights are back"
    if engine != "fsdp2":
        assert all(m.weight is weight for m, weight in zip(layers, kept, strict=True))
    passes = {count[m] for m in layers}
    assert passes <= {2, 3}, passes  # forward, backward, and one to be rebuilt: never once per tile
    assert apart(found, loss) < EXACT
    errors = {name: relative(g, wanted[name]) for name, g in grads.items()}
    assert len(errors) == 12 and max(errors.values()) <= EXACT, errors


MEMORIES = {
    "x+O+KV": Memory(4, Keep.X_O_KV),
    "x+O": Memory(4, Keep.X_O),
    "x, none": Memory(4, (Keep.X, Keep.NONE)),
    "compiled": Memory(4, Keep.X_O, "eager"),
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_packed_weights_are_made_plain_once_per_pass(run_ranks: RunRanks, kind: str, memory: str) -> None:
    run_ranks(1, packed_case, kind, MEMORIES[memory])


def test_packed_weights_on_two_ranks(run_ranks: RunRanks, kind: str) -> None:
    run_ranks(2, packed_case, kind, MEMORIES["x+O"], 2)


@pytest.mark.parametrize("memory", ["x+O", "x, none", "compiled"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_packed_weights_under_engines(run_ranks: RunRanks, engine: str, memory: str) -> None:
    pytest.importorskip("bitsandbytes")
    run_ranks(2, packed_case, "bnb", MEMORIES[memory], 2, engine)


def test_a_packed_head(run_ranks: RunRanks, kind: str) -> None:
    run_ranks(1, packed_case, kind, MEMORIES["x+O"], head=True)


def logps_case(kind: str) -> None:
    """Log-probabilities run the head again in backward, after the pass in which its weight was plain."""
    results = []
    for model in (packed_model(kind, head=True), plain_twin(kind, head=True)):
        handle = longspan.prepare(model, 1, memory=MEMORIES["x+O"])
        logps = handle.token_logps(handle.shard(ROWS.batch()), model=model)
        logps.sum().backward()
        results.append((logps.detach(), gradients(model)))
    (found, grads), (wanted, truth) = results
    assert relative(found, wanted) < EXACT
    assert max(relative(g, truth[name]) for name, g in grads.items()) <= EXACT


def test_log_probabilities_of_a_packed_head(run_ranks: RunRanks, kind: str) -> None:
    run_ranks(1, logps_case, kind)


def test_an_error_in_a_pass_leaves_the_weights_packed(kind: str) -> None:
    model = packed_model(kind)
    modules = [m for m in model.modules() if quantised(m)]
    with pytest.raises(RuntimeError, match="inside"), quantized.whole_weights(modules):  # noqa: PT012
        assert not any(quantised(m) for m in modules)
        raise RuntimeError("inside")
    assert all(quantised(m) for m in modules)


def test_sizes_of_packed_weights(kind: str) -> None:
    linear = nn.Linear(64, 128, bias=False)
    made = KINDS[kind](linear) or linear
    count, size = packed_size(made)
    assert count == 8192
    least, most = {"int8": (8192, 9000), "nf4": (4096, 6000), "bnb": (4096, 6000)}[kind]
    assert least <= size <= most
    assert packed_size(nn.Linear(4, 5)) == (0, 0)


def _float8(trained: bool, recipe: str) -> nn.Module:
    float8: Any = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    linear = float8.float8_linear.Float8Linear.from_float(nn.Linear(32, 32), config)
    linear.weight.requires_grad_(trained)
    return linear


def test_scales_over_tokens_are_found() -> None:
    assert "per-tensor" in str(mixes_tokens(_float8(False, "tensorwise")))
    assert "gradient of its weight" in str(mixes_tokens(_float8(True, "rowwise")))
    assert mixes_tokens(_float8(False, "rowwise")) is None
    assert mixes_tokens(_float8(True, "rowwise_with_gw_hp")) is None
    assert mixes_tokens(nn.Linear(4, 4)) is None


def test_scales_over_tokens_are_refused() -> None:
    model = build("llama", torch.float32)
    model.model.layers[1].mlp.up_proj = _float8(False, "tensorwise")
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj \(Float8Linear\) uses one float8 scale for all tokens"):
        longspan.prepare(model, 1)

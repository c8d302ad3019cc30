"""4-bit weights under adapters on a GPU: rounding of the plain model, one layer's weights unpacked at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan
from longspan.config import AdapterConfig
from longspan.integrations.adapters import add_adapter
from longspan.integrations.quantize import dequantize_layers, quantize_layers
from longspan.keep import Keep, Memory
from longspan.stream import quantized
from longspan.stream.quantized import packed_size, quantised, whole_weight

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}
MEMORIES: dict[str, Memory] = {
    "x+O+KV": Memory(256, Keep.X_O_KV),
    "x+O": Memory(256, Keep.X_O),
    "x, none": Memory(256, (Keep.X, Keep.NONE, Keep.NONE)),
    "compiled": Memory(256, Keep.X_O, "inductor"),
}


def build(packed: bool, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Any:
    """Build a model with float32 adapters that act; its weights are packed, or plain with what packing leaves."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **sizes}), dtype=torch.bfloat16)
    quantize_layers(model, "nf4", CUDA)
    if not packed:
        dequantize_layers(model)
    adapted: Any = add_adapter(model, AdapterConfig(kind="lora", rank=8, dtype="float32"), seed=2).to(CUDA).train()
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05)
    return adapted if dtype is torch.bfloat16 else adapted.to(dtype)


def batch(tokens: int = 2048) -> dict[str, Tensor]:
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        assert (p.grad is not None) == p.requires_grad, name
        if p.grad is not None:
            found[name] = p.grad.double()
    return found


def step(model: Any, memory: Memory, kernel: str = "auto") -> tuple[float, dict[str, Tensor], Counter[nn.Module]]:
    handle = longspan.prepare(model, 1, memory=memory, kernel=kernel)
    count: Counter[nn.Module] = Counter()

    def counting(module: nn.Module) -> Tensor | None:
        weight = whole_weight(module)
        count[module] += weight is not None
        return weight

    with patch.object(quantized, "whole_weight", counting):
        loss = model(**handle.shard(batch())).loss
        loss.backward()
    return float(loss.detach()), gradients(model), count


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - g).norm() / g.norm()) for name, g in wanted.items())


@pytest.mark.parametrize("memory", MEMORIES)
def test_packed_weights_round_like_plain_ones(memory: str) -> None:
    truth, wanted, _ = step(build(packed=False, dtype=torch.float32), Memory(), kernel="reference")
    _, plain, _ = step(build(packed=False), Memory())
    model = build(packed=True)
    modules = [m for m in model.modules() if quantised(m)]
    assert len(modules) == 21 and all(packed_size(m)[1] < 0.6 * packed_size(m)[0] for m in modules)
    loss, found, count = step(model, MEMORIES[memory])
    assert abs(loss - truth) < 5e-3 * truth
    assert worst(found, wanted) <= 1.5 * worst(plain, wanted) + 1e-3
    assert {count[m] for m in modules} <= {2, 3}, "per pass, not per tile"
    assert all(quantised(m) for m in modules)


def test_one_layers_weights_are_plain_at_a_time() -> None:
    """Peak memory grows by one layer's plain weights, however many layers there are."""
    peaks = []
    for layers in (2, 8):
        model = build(packed=True, num_hidden_layers=layers, hidden_size=2048, intermediate_size=8192, head_dim=256)
        handle = longspan.prepare(model, 1, memory=Memory(256, Keep.X_O))
        part = handle.shard(batch(512))
        model(**part).loss.backward()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(**part).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        layer = model.get_base_model().model.layers[0]
        plain_bytes = 2 * sum(packed_size(m)[0] for m in layer.modules())
        handle.remove()
        del model, handle, part, layer
    assert plain_bytes > 100 << 20
    assert peaks[0] >= plain_bytes
    assert peaks[1] - peaks[0] < plain_bytes, "six more layers, not one more layer's plain weights"


def test_automatic_memory_with_packed_weights() -> None:
    model = build(packed=True)
    handle = longspan.prepare(model, 1)
    part = handle.shard(batch(16384))
    out = model(**part)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    gradients(model)
    assert handle.plan.gpu_bytes

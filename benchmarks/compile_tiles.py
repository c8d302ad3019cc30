"""Does torch.compile of a tile beat eager and Liger's kernels? One Llama-3-8B layer, bf16, on one GPU.

    python benchmarks/compile_tiles.py [--tokens 16384] [--out FILE]

Times the two halves of a tile, `before` its attention (norm, projections, rotary) and `after` it (output projection,
MLP, residuals), forward and forward + backward, against the time of their matrix products alone at 756 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from longspan.batch import CONTEXT
from longspan.integrations.transformers.attention import NAME, register
from longspan.stream.calls import Capture, Inject, StopLayer


def before(layer: torch.nn.Module, x: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    call = Capture(frozenset())
    try:
        type(layer).forward(layer, x, **kwargs, **{CONTEXT: call})
    except StopLayer:
        pass
    request: Any = call.request
    return request.q, request.k, request.v


def after(layer: torch.nn.Module, x: Tensor, out: Tensor, kwargs: dict[str, Any]) -> Tensor:
    return type(layer).forward(layer, x, **kwargs, **{CONTEXT: Inject(out)})


def milliseconds(work: Callable[[], Any], repeats: int = 10) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def measure(tokens: int, kind: str) -> dict[str, float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        attn_implementation=NAME,
    )  # fmt: skip
    layer: torch.nn.Module = LlamaDecoderLayer(config, 0).to("cuda", torch.bfloat16)
    positions = torch.arange(tokens, device="cuda")[None]
    x = torch.randn(1, tokens, 4096, device="cuda", dtype=torch.bfloat16)
    tables = LlamaRotaryEmbedding(config).to("cuda")(x, positions)
    kwargs = {"position_embeddings": tables, "position_ids": positions, "attention_mask": None, "use_cache": False}
    out = torch.randn(1, tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
    run_before, run_after = before, after
    if kind == "compile":
        run_before = torch.compile(before, fullgraph=True, dynamic=False)
        run_after = torch.compile(after, fullgraph=True, dynamic=False)
    parameters = list(layer.parameters())
    grads = [torch.randn_like(t) for t in before(layer, x, kwargs)]

    def before_both() -> None:
        leaf = x.detach().requires_grad_()
        torch.autograd.grad(run_before(layer, leaf, kwargs), [leaf, *parameters], grads, allow_unused=True)

    def after_both() -> None:
        leaf, known = x.detach().requires_grad_(), out.detach().requires_grad_()
        torch.autograd.grad(run_after(layer, leaf, known, kwargs), [leaf, known, *parameters], x, allow_unused=True)

    with torch.no_grad():
        forward = (
            milliseconds(lambda: run_before(layer, x, kwargs)),
            milliseconds(lambda: run_after(layer, x, out, kwargs)),
        )
    return {
        "before_forward_ms": forward[0],
        "after_forward_ms": forward[1],
        "before_both_ms": milliseconds(before_both),
        "after_both_ms": milliseconds(after_both),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--out")
    options = parser.parse_args()
    register()
    flops = {"before": 2 * 4096 * (4096 + 2 * 1024), "after": 2 * (4096 * 4096 + 3 * 4096 * 14336)}
    floor = {name: value * options.tokens / 756e9 for name, value in flops.items()}
    rows: dict[str, dict[str, float]] = {
        "floor": {
            "before_forward_ms": floor["before"], "after_forward_ms": floor["after"],
            "before_both_ms": 3 * floor["before"], "after_both_ms": 3 * floor["after"],
        }
    }  # fmt: skip
    rows["eager"] = measure(options.tokens, "eager")
    rows["compile"] = measure(options.tokens, "compile")
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        print("liger_kernel is not installed; its rows are left out")
    else:
        apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)
        rows["liger"] = measure(options.tokens, "liger")
    for name, row in rows.items():
        print(name.ljust(8), "  ".join(f"{key} {value:7.3f}" for key, value in row.items()), flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(
                {
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "tokens": options.tokens,
                    "rows": rows,
                },
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()

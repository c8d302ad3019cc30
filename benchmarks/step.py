"""Seconds per optimizer step and peak memory of full fine-tuning at long sequences.

    torchrun --nproc-per-node 2 benchmarks/step.py --model llama-8b --seq 32768 131072 --memory 16384/x+O+KV/inductor

A memory setting is tile_tokens/keep/compile[@tokens,tokens]; keep is one decision or a list such as
graph*4,x+O+KV*28; tokens restricts it to these lengths.

Random weights and tokens, fp32 AdamW, FSDP2 with bf16 compute, micro-batch 1: the work that peers are measured on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from timeline import timeline
from transformers import AutoModelForCausalLM

import longspan
from longspan.engines.fsdp import FullyShardedDataParallel
from longspan.integrations.presets import preset_config
from longspan.plan.keep import Keep, Memory
from longspan.stream.compiled import Compiler


def memory_of(text: str) -> Memory:
    tile, keep, backend = text.partition("@")[0].split("/")
    runs = [part.partition("*") for part in keep.split(",")]
    keeps = tuple(Keep(name) for name, _, count in runs for _ in range(int(count or 1)))
    return Memory(int(tile), keeps[0] if len(keeps) == 1 else keeps, None if backend == "-" else backend)


def build(options: argparse.Namespace) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(0)
    config = preset_config(options.model, max_position_embeddings=1 << 24)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.float().train()
    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
    handle = longspan.prepare(
        model,
        dist.get_world_size(),
        ulysses_degree=options.ulysses,
        ring_degree=options.ring,
        kernel=options.kernel,
        memory=memory_of(options.memory[0]),
    )
    engine = FullyShardedDataParallel(torch.bfloat16)
    model = engine.wrap(model, handle)
    if options.keep_gathered:
        model.set_reshard_after_forward(False)
    return model, handle, engine


def one_step(model: torch.nn.Module, handle: Any, engine: Any, optimizer: Any, ids: torch.Tensor) -> float:
    part = handle.shard({"input_ids": ids, "labels": ids.clone()})
    with engine.accumulating(last=True):
        loss = model(**part).loss
        loss.backward()
    engine.reduce()
    engine.clip_grad_norm(1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def measured(options: argparse.Namespace, text: str, tokens: int, step: Any) -> list[dict[str, Any]]:
    rank, rows = dist.get_rank(), []
    for number in range(options.steps):
        ids = torch.randint(32000, (1, tokens), generator=torch.Generator().manual_seed(number)).cuda()
        torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(ids)
        torch.cuda.synchronize()
        row = {
            "memory": text,
            "tokens": tokens,
            "step": number,
            "step_s": round(time.perf_counter() - start, 4),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "loss": round(loss, 4),
        }
        rows.append(row)
        if rank == 0:
            print("STEP", f"liger={options.liger}", row, flush=True)
    if options.profile:
        told = timeline(lambda: step(ids))
        if rank == 0:
            print(f"TIMELINE {text} {tokens}\n{told}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--seq", type=int, nargs="+", default=[32768])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory", nargs="+", default=["16384/x+O+KV/inductor"])
    parser.add_argument("--ulysses", type=int)
    parser.add_argument("--ring", type=int)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--keep-gathered", action="store_true", help="FSDP2: parameters stay whole until backward")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    model, handle, engine = build(options)
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows: list[dict[str, Any]] = []
    for text in options.memory:
        handle.memory = memory_of(text)
        handle.compiler = handle.memory.compile and Compiler(handle.memory.compile)
        for tokens in [int(n) for n in text.partition("@")[2].split(",") if n] or options.seq:
            try:
                rows += measured(options, text, tokens, lambda ids: one_step(model, handle, engine, optimizer, ids))
            except torch.cuda.OutOfMemoryError as error:
                print(f"OOM {text} {tokens}: {str(error)[:80]}", flush=True)
                optimizer.zero_grad(set_to_none=True)
                torch.cuda.empty_cache()
    if rank == 0 and options.out:
        about = {"gpu": torch.cuda.get_device_name(), "gpus": dist.get_world_size(), "torch": torch.__version__}
        about |= {"commit": options.commit, "date": time.strftime("%Y-%m-%d"), "options": vars(options)}
        with open(options.out, "w") as file:
            json.dump(about | {"plan": handle.plan.to_json(), "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

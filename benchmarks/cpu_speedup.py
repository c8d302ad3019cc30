"""Step time of two sequence-parallel processes over that of one, on CPU cores, one thread each.

    python benchmarks/cpu_speedup.py [--out FILE]

A Llama of 4 layers, hidden size 512, 8 heads, one sequence of 8,192 tokens, fp32, gloo. The ideal is 0.5.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig

import longspan

TOKENS, STEPS = 8192, 3
SHAPE = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}


def worker(rank: int, world: int, ulysses: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=384, num_key_value_heads=8, max_position_embeddings=TOKENS, **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    handle = longspan.prepare(model, world, ulysses_degree=ulysses)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times, loss = [], torch.zeros(())
    for step in range(STEPS + 1):
        ids = torch.randint(384, (1, TOKENS), generator=torch.Generator().manual_seed(step))
        dist.barrier()
        start = time.perf_counter()
        loss = model(**handle.shard({"input_ids": ids, "labels": ids})).loss
        loss.backward()
        handle.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        results.put((statistics.median(times[1:]), loss.item()))
    dist.destroy_process_group()


def measure(world: int, ulysses: int) -> tuple[float, float]:
    """Return the median seconds per step and the last loss."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        mp.start_processes(
            worker, (world, ulysses, str(Path(folder) / "store"), results), nprocs=world, start_method="spawn"
        )
        return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    options = parser.parse_args()
    one, ulysses, ring = measure(1, 1), measure(2, 2), measure(2, 1)
    assert abs(ulysses[1] / one[1] - 1) < 1e-5 and abs(ring[1] / one[1] - 1) < 1e-5, (one, ulysses, ring)
    result = {
        "figures": {"P8": round(min(ulysses[0], ring[0]) / one[0], 3)},
        "step_s": {"one process": one[0], "ulysses 2": ulysses[0], "ring 2": ring[0]},
        "shape": SHAPE | {"tokens": TOKENS, "dtype": "float32", "threads per process": 1},
        "machine": f"{platform.machine()}, {mp.cpu_count()} cores",
        "torch": torch.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Write down what plans say of steps on H200 before they are measured.

    python benchmarks/predictions.py

writes `predictions.json` beside this file: a row per configuration with the command that measures it, and what is
expected of it. Nothing in the plan may be fitted to the rows that are `held_out`.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from longspan.bench.memory import format_memory
from longspan.bench.predict import Host, planned, predicted
from longspan.bench.settings import Work
from longspan.config import AdapterConfig
from longspan.integrations.presets import preset_config
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB

HERE = Path(__file__).parent
GPU_BYTES = find_machine("h200").memory_bytes
HOST_GIB = {1: 96, 2: 200}  # what plans may use of hosts with 128 and 256 GiB
CONFIGURATIONS: list[tuple[str, int, int, int | None, bool]] = [
    # model, GPUs, tokens, rank of LoRA, held out
    ("llama-1b", 1, 32 << 10, None, False),
    ("llama-1b", 1, 128 << 10, None, False),
    ("llama-1b", 1, 256 << 10, None, False),
    ("llama-1b", 1, 512 << 10, 16, True),
    ("llama-8b", 1, 32 << 10, 16, False),
    ("llama-8b", 1, 64 << 10, 16, True),
    ("llama-8b", 1, 128 << 10, 16, False),
    ("llama-1b", 2, 256 << 10, None, False),
    ("llama-1b", 2, 512 << 10, 16, True),
    ("llama-8b", 2, 32 << 10, None, False),
    ("llama-8b", 2, 64 << 10, None, True),
    ("llama-8b", 2, 128 << 10, None, False),
    ("llama-8b", 2, 128 << 10, 16, False),
]


def prediction(model: str, gpus: int, tokens: int, lora_rank: int | None, held_out: bool) -> dict[str, Any]:
    """Return a row."""
    host = Host("NVIDIA H200", gpus, GPU_BYTES, HOST_GIB[gpus] * GIB)
    adapter = None if lora_rank is None else AdapterConfig(kind="lora", rank=lora_rank)
    work = Work(model, gpus, host_memory_bytes=host.host_bytes, adapter=adapter)
    config = preset_config(model, max_position_embeddings=1 << 24)
    memory = planned(config, work, host, tokens)
    command = f"longspan bench step --model {model} --sp {gpus} --seq-len {tokens} --steps 2"
    command += f" --host-memory {HOST_GIB[gpus]}GiB" + ("" if lora_rank is None else f" --lora-rank {lora_rank}")
    row = {"model": model, "gpus": gpus, "tokens": tokens, "lora_rank": lora_rank, "held_out": held_out}
    return {**row, "memory": format_memory(memory), **predicted(config, work, host, tokens, memory), "command": command}


def main() -> None:
    """Predict all of them."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    rows = [prediction(*configuration) for configuration in CONFIGURATIONS]
    about = {"gpu": "NVIDIA H200", "commit": commit.stdout.strip(), "date": time.strftime("%Y-%m-%d"), "rows": rows}
    (HERE / "predictions.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

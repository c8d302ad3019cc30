"""Runs as their files tell of them, made without training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from longspan.report import End, Facts, PlanFacts, write_facts
from longspan.report.facts import Device, Place

GIB = 2**30


def facts(**changes: Any) -> Facts:
    """Return what is known of an 8B model on two GPUs."""
    values: dict[str, Any] = {
        "run": "0a1b2c3d",
        "starts": ["2026-11-30T08:00:00+00:00"],
        "introduction": "llama-8b: 8,030,261,248 parameters, engine fsdp2 on 2 cuda processes, sequence_length "
        "131,072, sp 2 = ulysses 2 x ring 1",
        "data": "1,204 documents, 98,304,000 tokens; 61 cut, 1,344 pieces in all",
        "config": {
            "model": {"name": "llama-8b", "init": "random", "dtype": "float32"},
            "sequence_length": 131072,
            "memory": {"keep": "auto", "tile_tokens": None},
            "max_steps": 200,
            "output_dir": "out/run",
        },
        "versions": {"python": "3.12.4", "longspan": "0.1.0", "torch": "2.11.0", "deepspeed": None},
        "machine": Place(
            host="node-7",
            platform="Linux-6.8",
            processes=2,
            device="cuda",
            devices=[Device(type="cuda", name="NVIDIA H200", memory_bytes=139 * GIB)] * 2,
        ),
        "plan": PlanFacts(
            gpu_bytes={"parameters": 28e9, "optimizer": 32e9, "activations": 34e9},
            host_bytes={"kept tensors": 61e9},
            seconds={"matrix products": 12.1, "attention": 6.2, "exchange": 0.6, "optimizer": 0.3},
            tokens_per_s=6826.0,
            mfu=0.47,
            reasons=["8 key heads serve ulysses 2", "layers keep x+O+KV, as memory allows"],
        ),
    }
    return Facts(**{**values, **changes})


def rows(count: int) -> list[dict[str, Any]]:
    """Return rows of such a run, the first of them slow."""
    made, found = random.Random(3), []
    for step in range(1, count + 1):
        step_s = (41.0 if step == 1 else 18.9) + made.gauss(0, 0.25)
        gpu = round((88 + made.random()) * GIB)
        row: dict[str, Any] = {
            "step": step,
            "loss": 1.9 + 3.2 * math.exp(-step / 35) + made.gauss(0, 0.05),
            "grad_norm": 0.8 + 5 * math.exp(-step / 9) + abs(made.gauss(0, 0.12)),
            "lr": 2e-5 * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * step / 200)),
            "tokens": 131072,
            "tokens_per_s": 131072 / step_s,
            "mfu": 8.9 / step_s,
            "mfu_full": 12.1 / step_s,
            "peak_gpu_bytes": 89 * GIB,
            "peak_host_bytes": 71 * GIB,
            "gpu_bytes": gpu,
            "host_bytes": round((66 + min(step / 10, 4)) * GIB),
            "step_s": step_s,
            "data_s": 0.3 + 0.1 * made.random(),
            "forward_s": 5.1,
            "reduce_s": 0.05,
            "optimizer_s": 0.31,
            "other_s": 0.2,
            "exchange_s": 0.9 + 0.2 * made.random(),
        }
        row["backward_s"] = step_s - sum(
            row[f"{name}_s"] for name in ("data", "forward", "reduce", "optimizer", "other")
        )
        found.append(row)
    return found


def leave(folder: Path, found: Facts | None, steps: list[dict[str, Any]], tail: str = "") -> Path:
    """Write what a run leaves, with something behind its last whole row."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps) + tail)
    if found is not None:
        write_facts(folder, found)
    return folder


def ended(kind: Any = "ended", text: str = "all steps were taken") -> End:
    """Return an end."""
    return End(kind=kind, text=text, time="2026-11-30T09:03:00+00:00")

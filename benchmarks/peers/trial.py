"""What the scripts of all peers share: the model, the tokens, the clock, and how a row is told."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.bench.workload import LEARNING_RATE, random_tokens
from longspan.integrations.presets import preset_config

WARM_UP_TOKENS = 16_384
IGNORED = -100


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[32768])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def join() -> tuple[int, int]:
    """Take this process's GPU; return rank and size."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    return rank, size


def config_of(options: argparse.Namespace) -> Any:
    layers = {} if options.layers is None else {"num_hidden_layers": options.layers}
    return preset_config(options.model, max_position_embeddings=1 << 24, **layers)


def shard(row: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, their positions, and the tokens that they are to predict, all [1, s]."""
    targets = torch.nn.functional.pad(row[:, 1:], (0, 1), value=IGNORED)
    each = row.shape[1] // size
    mine = slice(rank * each, (rank + 1) * each)
    places = torch.arange(row.shape[1])[None]
    return tuple(t[:, mine].cuda() for t in (row, places, targets))  # type: ignore[return-value]


def measure(
    options: argparse.Namespace,
    step: Callable[[Tensor, Tensor, Tensor, int, float], Tensor],
    vocabulary: int,
    about: dict[str, Any],
) -> None:
    """Time steps at every length and print a row after each step.

    Args:
        step: (ids, positions, targets, targets of all ranks, learning rate) -> this rank's part of the mean loss.
        about: what else the rows say.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def timed(tokens: int, number: int, lr: float) -> tuple[float, float]:
        part = shard(random_tokens(vocabulary, tokens, options.seed, number), rank, size)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(*part, tokens - 1, lr)
        dist.all_reduce(loss)
        value = loss.item()
        torch.cuda.synchronize()
        return time.perf_counter() - start, value

    for tokens in options.seq_len:
        if tokens % size:
            raise SystemExit(f"{tokens} tokens do not divide over {size} ranks")
        timed(min(tokens, WARM_UP_TOKENS), 999, 0.0)
        times: list[float] = []
        losses: list[float] = []
        torch.cuda.reset_peak_memory_stats()
        for number in range(options.steps):
            seconds, loss = timed(tokens, number, LEARNING_RATE)
            times.append(round(seconds, 4))
            losses.append(round(loss, 5))
            peak = torch.tensor([torch.cuda.max_memory_allocated()], device="cuda")
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            if rank == 0:
                median_s = round(statistics.median(times), 4)
                row = {"tokens": tokens, "steps": times, "step_s": median_s, "losses": losses}
                row |= {"tokens_per_s": round(tokens / median_s, 1), "peak_gib": round(peak.item() / 2**30, 2)}
                print("ROW " + json.dumps({**about, **row}), flush=True)

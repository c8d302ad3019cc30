"""No number without a proof: what is measured must first equal the plain model, in small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from longspan.bench.memory import format_memory, in_small
from longspan.bench.settings import Work
from longspan.check.run import run_check
from longspan.check.settings import Settings
from longspan.integrations.refusals import head_counts
from longspan.keep import Memory
from longspan.plan.degrees import choose_degrees

_GPU_TILE_TOKENS, _CPU_TILE_TOKENS = 96, 16
_TILES = 3
_ODD_TOKENS = 7


@dataclass(frozen=True)
class Small:
    """A check that stands for a benchmark: the same widths, kernel, degrees, engine and adapters, and the same kinds of
    layers and tiles."""

    settings: Settings

    @property
    def name(self) -> str:
        """What tells it from other checks of the same work."""
        settings = self.settings
        assert settings.memory is not None
        return f"{settings.engine} {settings.seq_len} {format_memory(settings.memory)} {settings.adapted}".rstrip()


def small(config: Any, work: Work, memory: Memory, tokens: int, device: torch.device) -> Small:
    """Choose the check for a memory setting and a length.

    Where the benchmark runs in several tiles, so does the check, and its last tile is smaller; where it runs in one,
    the check's tile is as large as its shard.
    """
    one_tile = memory.tile_tokens is None or tokens <= memory.tile_tokens * work.sp
    tile = _GPU_TILE_TOKENS if device.type == "cuda" else _CPU_TILE_TOKENS
    each = tile if one_tile else _TILES * tile + _ODD_TOKENS
    text = config.get_text_config()
    chosen, layers = in_small(memory, tile, 4 * each * text.hidden_size)
    degrees = choose_degrees(*head_counts(config), work.sp, ulysses=work.ulysses, ring=work.ring)
    settings = Settings(
        work.model,
        work.sp,
        degrees.ulysses,
        degrees.ring,
        seq_len=each * work.sp,
        layers=len(layers) or None,
        kernel=work.kernel,
        memory=chosen,
        engine=work.chosen_engine,
        only=("document", "packed"),
        adapter=work.adapter,
    )
    return Small(settings)


def gate(config: Any, asked: Small, device: torch.device) -> dict[str, Any]:
    """Run a check; every rank calls it and gets the verdict: `ok`, `why`, and the largest errors.

    Raises:
        LongspanError: it cannot be checked, so it cannot be measured either.
    """
    result = run_check(config, asked.settings, device)
    return everywhere(None if result is None else summary(result))


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Shorten the result of a check."""
    cases = result["cases"]
    worst = {
        name: max((case[name] for case in cases if case[name] is not None), default=None)
        for name in ("loss_rel_err", "grad_rel_err", "eval_rel_err", "leak", "baseline_grad_rel_err")
        if any(name in case for case in cases)
    }
    why = [f"{case['name']}: {reason}" for case in cases for reason in case["why"]]
    about = {name: result[name] for name in ("dtype", "kernel", "layers", "seq_len")}
    return {"ok": result["ok"], "why": why, **about, **worst}


def everywhere(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def first_failure(work: Callable[[], list[str]]) -> dict[str, Any]:
    """Run a comparison that lists what is wrong on this rank; the verdict is that of all ranks."""
    found = work()
    told: list[Any] = [found]
    if dist.is_initialized():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, found)
    why = [reason for reasons in told for reason in reasons]
    return {"ok": not why, "why": why}

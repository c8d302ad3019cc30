"""What the loop refuses before it moves a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from longspan.config import ModelConfig
from longspan.errors import ConfigError
from longspan.evaluate.run import _model
from longspan.evaluate.source import Source
from longspan.integrations.models import build_model
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import random_model
from longspan.train import room

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 257}
DRAWN = ModelConfig(name="tiny-llama", init="random", overrides=SIZES)
LAYER = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 512 + 2 * 64)
OUTSIDE = 4 * (2 * 257 * 64 + 64)
"""Bytes of a layer, and of what is outside layers."""


def test_weights_that_a_gpu_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False), "norm": nn.BatchNorm1d(3)}
    )
    model["head"].weight = model["embed"].weight  # tied: counted once
    needed_bytes = 4 * (10 * 4 + 4 * 3) + 8  # and the norm's four vectors and its counter
    gpu = torch.device("cuda", 0)
    free_bytes = needed_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 10**9) if device == gpu else None)
    room.check_memory(model, gpu)
    free_bytes -= 1
    with pytest.raises(ConfigError, match=r"need 216 bytes, but cuda:0 has 215 bytes free.*model\.dtype"):
        room.check_memory(model, gpu)
    room.check_memory(model, CPU)


def test_what_a_gpu_must_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share, a layer and what is outside layers; computing in half the bytes, the larger of the two as it comes."""
    blank, gpu = build_model(DRAWN, 0, blank=True), torch.device("cuda", 0)
    share = (8 * LAYER + OUTSIDE) // 2
    free_bytes = 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 0))
    for compute_dtype, whole in (
        (None, LAYER + OUTSIDE),
        (torch.bfloat16, max(LAYER, OUTSIDE, (LAYER + OUTSIDE) // 2)),
    ):
        free_bytes = share + whole
        room.check_share(blank, gpu, 2, compute_dtype)
        free_bytes -= 1
        with pytest.raises(ConfigError) as raised:
            room.check_share(blank, gpu, 2, compute_dtype)
        parts = f"{share:,} bytes as its share of 2, and {whole:,} of what is whole at a time"
        told = str(raised.value)
        assert parts in told and f"has {free_bytes:,} bytes free" in told and "start more processes" in told
    room.check_share(blank, CPU, 2, None)


def test_room_is_looked_for_before_weights_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """To evaluate as to train, whether a GPU gets a share or the whole; alone, a model to evaluate as it is built."""
    gpu, free_bytes = torch.device("cuda", 0), (8 * LAYER + OUTSIDE) // 2 + LAYER + OUTSIDE
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 0))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    asked: list[bool] = []

    def build(blank: bool) -> Any:
        asked.append(blank)
        return build_model(DRAWN, 0, blank=blank)

    blank = room.blank_model(build, gpu, "fsdp2", None)
    assert blank is not None and all(parameter.is_meta for parameter in blank.parameters())
    with pytest.raises(ConfigError, match="and come there whole"):
        room.blank_model(build, gpu, "ddp", None)
    free_bytes -= 1
    with pytest.raises(ConfigError, match="as its share of 2"):
        room.blank_model(build, gpu, "zero-3", None)
    assert asked == [True] * 3
    free_bytes = 1000
    for processes, engine, told in ((2, "fsdp2", "as its share of 2"), (2, "single", "whole"), (1, "single", "whole")):
        monkeypatch.setattr(dist, "get_world_size", lambda processes=processes: processes)
        with pytest.raises(ConfigError, match=told):
            _model(Source.of("tiny-llama"), "float32", gpu, engine)


def test_what_the_first_host_must_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights that are drawn or converted; those of files in the model's own type are mapped."""
    random_model(preset_config("tiny-llama", **SIZES), torch.float32, CPU).save_pretrained(tmp_path)
    mapped = ModelConfig(name=str(tmp_path))
    converted = ModelConfig(name=str(tmp_path), dtype="bfloat16")
    bytes_of = {"float32": 8 * LAYER + OUTSIDE, "bfloat16": (8 * LAYER + OUTSIDE) // 2}
    for settings in (DRAWN, mapped, converted):
        blank, needed = build_model(settings, 0, blank=True), bytes_of[settings.dtype]
        monkeypatch.setattr(room, "host_bytes", lambda seen, needed=needed: needed)
        room.check_host(blank, settings)
        monkeypatch.setattr(room, "host_bytes", lambda seen, needed=needed: needed - 1)
        if settings is mapped:
            room.check_host(blank, settings)
            continue
        with pytest.raises(ConfigError, match=f"weights need {needed:,} bytes, but {needed - 1:,} are available"):
            room.check_host(blank, settings)

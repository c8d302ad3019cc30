"""What windows cost: as often as keys travel in a schedule, and attention to what is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longspan.attention.schedule import Schedule
from longspan.integrations.shapes import model_shape
from longspan.layout import Layout
from longspan.mask import Mask
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB, Cluster
from longspan.plan.setup import OPTIMIZERS, Setup
from longspan.plan.time import Clock


def setup(tokens: int, ring: int = 1) -> Setup:
    cluster = Cluster(find_machine("h200"), ring, min(ring, 8), 139 * GIB, 256 * GIB)
    return Setup(model_shape("llama-8b"), cluster, "fsdp2", OPTIMIZERS["adamw"], 1, ring, tokens)


@pytest.mark.parametrize("ring", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [1, 2, 256, 4097, 4098, 20_000, 1 << 17])
def test_windows_shift_keys_as_often_as_their_schedules_say(ring: int, window: int) -> None:
    made = setup(3 << 16, ring=ring)
    layer = replace(made.shape.layers[0], window=window)
    schedule = Schedule.of(Mask(made.tokens, window=window), Layout(made.tokens, ring), 0)
    assert Clock(made).shifts(layer) == len(schedule.offsets) - 1


def test_windows_cost_less_attention() -> None:
    made = setup(1 << 17)
    layer = made.shape.layers[0]
    for whole, part in zip(*(Clock(made).attention_s(replace(layer, window=w)) for w in (None, 4096)), strict=True):
        assert part == pytest.approx(whole * 2 * 4096 / (1 << 17), rel=0.02)

"""What the plan says of settings that are given by hand."""

from __future__ import annotations

import pytest

from longspan.bench.memory import format_memory, parse_memory
from longspan.bench.predict import Host, planned, predicted
from longspan.bench.settings import Work
from longspan.errors import ConfigError
from longspan.integrations.presets import preset_config

CONFIG = preset_config("llama-8b")
H200S = Host("NVIDIA H200", 2, 139 << 30, 256 << 30)
WORK = Work("llama-8b", 2)


def seconds(text: str, tokens: int = 131072) -> float:
    return predicted(CONFIG, WORK, H200S, tokens, parse_memory(text))["predicted_s"]


def test_more_recomputation_takes_longer() -> None:
    kept, one, two = (seconds(f"16384/{keep}/inductor") for keep in ("x+O+KV", "x+O", "x"))
    assert 15 < kept < one < two < 40
    chained = seconds("16384/x,none*7,x,none*7,x,none*7,x,none*7/inductor/rebuilt=O")
    assert two < chained < 2 * two
    assert one < seconds("16384/x+O,O*7,x+O,O*23/inductor")


def test_memory_is_told_without_what_is_kept_free() -> None:
    found = predicted(CONFIG, WORK, H200S, 131072, parse_memory("16384/x+O+KV/inductor"))
    assert 70 < found["predicted_gib"] < 120
    away = predicted(CONFIG, WORK, H200S, 131072, parse_memory("16384/x+O/inductor/gpu=4GiB,host=100GiB"))
    assert away["predicted_gib"] < found["predicted_gib"] - 20
    assert away["predicted_host_gib"] > 40


def test_degrees_by_hand_are_followed() -> None:
    ring = Work("llama-8b", 2, ring=2)
    found = predicted(CONFIG, ring, H200S, 131072, parse_memory("16384/x+O+KV/inductor"))
    assert found["predicted_s"] != seconds("16384/x+O+KV/inductor")


def test_what_the_plan_would_not_do_has_no_prediction() -> None:
    assert predicted(CONFIG, WORK, H200S, 131072, parse_memory("16384/graph*4,x+O*28/-")) == {}
    assert seconds("16384/products/inductor", 32768) < seconds("16384/x+O+KV/inductor", 32768)


def test_an_unknown_gpu_has_no_prediction_and_no_plan() -> None:
    strange = Host("Acme T9000", 2, 139 << 30, 0)
    assert predicted(CONFIG, WORK, strange, 131072, parse_memory("16384/x+O/-")) == {}
    with pytest.raises(ConfigError, match="no figures for Acme T9000"):
        planned(CONFIG, WORK, strange, 131072)


@pytest.mark.parametrize("tokens", [32768, 131072, 1 << 20])
def test_the_plans_choice_can_be_written_as_text(tokens: int) -> None:
    memory = planned(CONFIG, WORK, H200S, tokens)
    assert parse_memory(format_memory(memory)) == memory


def test_the_plan_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        planned(CONFIG, WORK, Host("NVIDIA H200", 2, 139 << 30, 0), 1 << 24)

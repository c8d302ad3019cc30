"""What the plan says today of every setting that was measured on GPUs, held against the measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longspan.bench.memory import parse_memory
from longspan.bench.predict import Host, predicted
from longspan.bench.settings import AUTO, Work
from longspan.config import AdapterConfig
from longspan.integrations.presets import preset_config
from longspan.plan.library import find_machine

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = ("model", "sp", "ulysses", "ring", "kernel", "engine", "optimizer", "host_memory_bytes")


def measured() -> Iterator[Any]:
    """Yield (work, row) of all rows of whole models whose memory was decided by the plan or by hand."""
    for path in sorted((*RESULTS.glob("step_h200*.json"), *RESULTS.glob("fit_h200*.json"))):
        found = json.loads(path.read_text(encoding="utf-8"))
        about = found.get("asked", {}).get("work")
        if about is None or about["layers"] is not None:
            continue
        adapter = about.get("adapter")
        values = {name: about[name] for name in NAMES}
        work = Work(**values, adapter=None if adapter is None else AdapterConfig(**adapter))
        for n, row in enumerate(found["rows"]):
            if row["system"] == "longspan" and row["state"] == "done" and row["memory"] == AUTO:
                yield pytest.param(work, row, id=f"{path.stem}-{n}")


@pytest.mark.parametrize(("work", "row"), list(measured()))
def test_memory_within_a_tenth_and_time_within_three_twentieths(work: Work, row: dict[str, Any]) -> None:
    host = Host("NVIDIA H200", work.sp, find_machine("h200").memory_bytes, work.host_memory_bytes)
    config = preset_config(work.model, max_position_embeddings=1 << 24)
    found = predicted(config, work, host, row["tokens"], parse_memory(row["chosen"]))
    assert found["predicted_gib"] == pytest.approx(row["peak_gib"], rel=0.10)
    if len(row.get("steps", ())) > 1:  # one step alone pinned its host memory within
        assert found["predicted_s"] == pytest.approx(row["step_s"], rel=0.15)

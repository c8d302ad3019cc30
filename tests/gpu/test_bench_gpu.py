"""The harness on GPUs: compiled tiles, exchanges by both ways, attention, a profile, and rows that fit or do not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def bench(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "longspan", "bench", *arguments, "--json", "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == code, done.stderr[-4000:]
    return json.loads(done.stdout)


SHAPE = ("--model", "llama-1b", "--layers", "2")


@pytest.mark.multi_gpu
def test_steps_of_compiled_tiles(tmp_path: Path) -> None:
    """Two settings, each on the weights that everyone starts from, lose the same."""
    first = []
    for memory in ("1024/x+O+KV/inductor", "1024/x,none*1/-/gpu=1MiB,host=1GiB"):
        found = bench(
            tmp_path, "step", *SHAPE, "--sp", "2", "--seq-len", "8K", "--steps", "2", "--profile", "--memory", memory,
        )  # fmt: skip
        assert all(gate["ok"] for gate in found["gates"].values())
        (row,) = found["rows"]
        assert row["state"] == "done"
        assert row["peak_gib"] > 0.5
        assert row["predicted_s"] > 0
        assert all(math.isfinite(loss) for loss in row["losses"])
        assert any("attention" in line for line in row["timeline"])
        first.append(row["losses"][0])
    assert abs(first[0] - first[1]) < 0.01


@pytest.mark.multi_gpu
def test_exchange_and_attention(tmp_path: Path) -> None:
    found = bench(tmp_path, "exchange", "--sp", "2", "--payload-mib", "16", "--times", "5")
    assert {row["name"] for row in found["rows"]} >= {"q to heads", "q to tokens"}
    assert all(row["state"] == "done" and row["median_ms"] > 0 for row in found["rows"])
    found = bench(tmp_path, "attention", "--sp", "2", "--seq-len", "8K", "--times", "3")
    assert {row["name"] for row in found["rows"]} == {"dense", "packed", "packed, long documents"}
    assert all(0 < row["share"] < 1.5 for row in found["rows"])


@pytest.mark.gpu
def test_fit_on_one_gpu_with_its_optimizer_on_the_host(tmp_path: Path) -> None:
    found = bench(
        tmp_path, "fit", *SHAPE, "--sp", "1", "--seq-len", "8K,64M", "--optimizer", "adamw-host",
        "--memory", "1024/x+O/inductor", code=1,
    )  # fmt: skip
    assert [row["state"].split(":")[0] for row in found["rows"]] == ["done", "out of memory"]
    assert found["rows"][0]["peak_gib"] > 0.5

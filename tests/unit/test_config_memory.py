"""The memory section of a run's YAML: what it stands for, what it refuses, and that training does what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longspan.config import parse_config
from longspan.errors import ConfigError
from longspan.keep import Budget, Keep, Memory
from longspan.plan.kept import Tier
from longspan.train import loop
from test_config import minimal
from test_train_optimizers import longspan, run_file

DOUBLE = {"name": "tiny-llama", "init": "random", "dtype": "float64"}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 257}
X, NONE, OUT = Keep.X, Keep.NONE, Keep.OUT


def decided(**fields: Any) -> Any:
    return parse_config(minimal(memory=fields)).memory.decided


@pytest.mark.parametrize(
    ("fields", "memory"),
    [
        ({}, "auto"),
        ({"keep": "auto"}, "auto"),
        ({"keep": "graph"}, Memory()),
        ({"keep": "x+O", "tile_tokens": "16K"}, Memory(16384, Keep.X_O)),
        ({"keep": "x, none*2"}, Memory(None, (X, NONE, NONE))),
        ({"keep": ["x", "none*2", "x"]}, Memory(None, (X, NONE, NONE, X))),
        ({"keep": "x"}, Memory(None, X)),
        ({"keep": ["x"]}, Memory(None, (X,))),
        ({"keep": ["x*3"]}, Memory(None, (X, X, X))),
        ({"keep": "graph", "tile_tokens": 64, "compile": "inductor"}, Memory(64, Keep.GRAPH, "inductor")),
        ({"keep": "products", "tile_tokens": 64, "compile": "eager"}, Memory(64, Keep.PRODUCTS, "eager")),
        ({"keep": ["x", "none"], "rebuilt": ["x", "O"]}, Memory(None, (X, NONE), None, (X, OUT))),
        (
            {"keep": "x", "gpu_bytes": 0, "host_bytes": "1.5GiB", "directory": "/d", "moving_bytes": "64kib"},
            Memory(None, X, budget=Budget(0, 3 << 29, "/d", 65536)),
        ),
    ],
)
def test_a_section_is_a_memory(fields: dict[str, Any], memory: Any) -> None:
    assert decided(**fields) == memory
    again = parse_config(minimal(memory=json.loads(parse_config(minimal(memory=fields)).model_dump_json())["memory"]))
    assert again.memory.decided == memory


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keep": "y"}, "memory.keep: layers keep one of graph, products, .*got 'y'"),
        ({"keep": []}, "memory.keep: layers keep one of"),
        ({"keep": "x*0"}, "memory.keep: layers keep one of"),
        ({"keep": "x*99999"}, "memory.keep: layers keep one of"),
        ({"keep": ["x", "auto"]}, "memory.keep: layers keep one of"),
        ({"keep": ["x", 1]}, "memory.keep: .* cannot be used"),
        ({"keep": "x,none", "rebuilt": "auto"}, "memory.rebuilt: layers keep one of"),
        ({"keep": "x,none", "rebuilt": "graph"}, "memory: rebuilt cannot be 'graph'"),
        ({"keep": "x", "rebuilt": "O"}, "memory: rebuilt has no effect where .*: leave it out"),
        ({"keep": "x+O,O*2", "rebuilt": "O"}, "memory: rebuilt has no effect where no layer with 'O' or 'none'"),
        ({"keep": "none*2"}, "memory: Layer 0 keeps nothing"),
        ({"keep": "products"}, "memory: keep 'products' needs compile"),
        ({"keep": "x", "compile": "inductor"}, "memory: compile needs tile_tokens"),
        ({"keep": "x", "compile": "fast"}, "memory.compile: 'fast' cannot be used. Allowed: inductor | eager"),
        ({"keep": "graph", "tile_tokens": 8}, "memory: tile_tokens=8 has no effect .* or choose another keep"),
        ({"keep": "graph", "gpu_bytes": 8}, "memory: gpu_bytes has no effect on layers that keep their graph"),
        ({"keep": "x", "host_bytes": 8}, "memory: host_bytes, .* no effect without gpu_bytes"),
        ({"keep": "x", "moving_bytes": 8}, "memory: host_bytes, .* no effect without gpu_bytes"),
        ({"keep": "x", "gpu_bytes": "12GX"}, "memory.gpu_bytes: An amount of memory is given as 64GiB.*'12GX'"),
        ({"keep": "x", "gpu_bytes": -1}, "memory.gpu_bytes: -1 .* >= 0, also as 64GiB"),
        ({"keep": "x", "gpu_bytes": True}, "memory.gpu_bytes: An amount"),
        ({"keep": "x", "gpu_bytes": 0, "directory": ""}, "memory.directory: '' cannot be used"),
        *[
            ({name: value}, f"memory: {name} has no effect with keep: auto.*: leave it out, or set keep")
            for name, value in {
                "tile_tokens": 8, "compile": "inductor", "rebuilt": "O", "gpu_bytes": 0, "host_bytes": 1,
                "directory": "/tmp", "moving_bytes": 0,
            }.items()
        ],
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        decided(**fields)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"keep": "x,none*2"}, "memory: keep lists 3 decisions, the model has 2 layers"),
        ({"keep": "x,none", "rebuilt": "O*3"}, "memory: rebuilt lists 3 decisions, the model has 2 layers"),
        ({"keep": "x", "gpu_bytes": 0, "directory": "/nowhere"}, "memory: No file .* in the directory /nowhere"),
    ],
)
def test_what_does_not_fit_the_model_or_the_host_is_told_before_it_is_built(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    code, _, err = longspan("train", run_file(tmp_path, memory=fields), "--nproc", "1")
    assert code == 2 and re.search(said, err), err
    assert not (tmp_path / "out").exists()


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, **memory: Any) -> tuple[list[float], Any]:
    """Return losses and gradient norms of a run in float64, and what `longspan.prepare` made of its model."""
    handles, assemble = [], loop.assemble

    def assembled(*arguments: Any) -> Any:
        trainee = assemble(*arguments)
        handles.append(trainee.handle)
        return trainee

    monkeypatch.setattr(loop, "assemble", assembled)
    file = run_file(folder, model={**DOUBLE, "overrides": SIZES}, memory=memory, max_steps=3)
    code, _, err = longspan("train", file, "--nproc", "1")
    assert code == 0, err
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in ("loss", "grad_norm")], handles[0]


@pytest.mark.parametrize(
    "memory",
    [
        {"keep": "products", "tile_tokens": 16, "compile": "eager"},
        {"keep": ["x", "none*2", "x+O+KV"], "tile_tokens": 24, "rebuilt": "O"},
        {"keep": "x+O", "gpu_bytes": "48KiB", "host_bytes": "64KiB", "moving_bytes": "32KiB", "directory": True},
    ],
    ids=["products", "list", "tiers"],
)
def test_the_curve_is_that_of_whole_graphs(
    tmp_path: Path, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = trained(tmp_path / "graph", monkeypatch, keep="graph")
    if "directory" in memory:
        memory = {**memory, "directory": str(tmp_path)}
    found, handle = trained(tmp_path / "other", monkeypatch, **memory)
    assert len(found) == 6 and found == pytest.approx(expected, rel=1e-10)
    assert handle.memory == decided(**memory)
    used = {tier for tier in Tier if handle.stash.usage.peak[tier]}
    assert used == (set(Tier) if "directory" in memory else {Tier.GPU})

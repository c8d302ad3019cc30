"""The harness from end to end on CPUs: rows with numbers where the gate is green, none where it is red."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from longspan.attention.gathering import Gathering
from longspan.attention.schedule import Schedule
from longspan.bench import exchange
from longspan.bench.attention import document_starts, measure_attention, short_documents
from longspan.bench.clock import Deadline
from longspan.bench.exchange import STANDARD_TOKENS, Exchanging, Heads, measure_exchange
from longspan.bench.fit import fit
from longspan.bench.gate import small
from longspan.bench.measure import Case, measure
from longspan.bench.memory import parse_memory
from longspan.bench.results import Results, Target
from longspan.bench.settings import Asked, Setting, Work, settings_of
from longspan.bench.step import Steps
from longspan.bench.workload import Workload, build, random_tokens
from longspan.cli import bench as commands
from longspan.cli.app import app
from longspan.cli.bench_flags import StepFlags
from longspan.cli.bench_jobs import WorkJob
from longspan.config import AdapterConfig
from longspan.errors import ConfigError
from longspan.integrations.presets import preset_config
from longspan.integrations.random_weights import untrained_model
from longspan.kernels.cpu import Cpu
from longspan.mask import Mask
from longspan.stream.arena import HostMemory
from longspan.tiling import GradientSum
from pool import RunRanks

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
ENOUGH = Deadline(None)
TIMEOUT_S = 180
RANK = 4
ROW_KEYS = {"system", "memory", "tokens", "state", "gate", "step_s", "steps", "losses", "peak_gib", "host_gib"}


def wrong_backward() -> Any:
    right = Cpu.backward

    def backward(self: Cpu, *args: Any) -> Any:
        dq, dk, dv = right(self, *args)
        return dq, dk, 1.01 * dv

    return patch.object(Cpu, "backward", backward)


def wrong_exchange() -> Any:
    """Exchange heads so that they come back in another order."""
    from longspan.comm.exchange import to_tokens

    def reordered(*args: Any) -> Any:
        return to_tokens(*args).then(lambda found: [t.flip(2) for t in found])

    return patch.object(exchange, "to_tokens", reordered)


def lost_documents() -> Any:
    """Let packed documents see each other."""
    right = Schedule.of
    return patch.object(Schedule, "of", lambda mask, *rest: right(Mask(mask.length), *rest))


def lost_keys() -> Any:
    """Gather the keys of other ranks in another order."""
    right = Gathering.on

    def on(self: Gathering, device: torch.device) -> Any:
        at = right(self, device)
        return replace(at, own=at.own.flip(0))

    return patch.object(Gathering, "on", on)


def lost_adapters() -> Any:
    """Lose a share of the gradients of adapters in layers that run in tiles."""
    right = GradientSum.add

    def add(self: GradientSum, grads: Any) -> None:
        right(self, [g if g is None or RANK not in g.shape else 0.99 * g for g in grads])

    return patch.object(GradientSum, "add", add)


MISTAKES = {
    "": contextlib.nullcontext,
    "backward": wrong_backward,
    "exchange": wrong_exchange,
    "borders": lost_documents,
    "keys": lost_keys,
    "adapters": lost_adapters,
}


def measured(asked: Asked, folder: str, mistake: str = "", until: float | None = None) -> dict[str, Any] | None:
    measure_one: Any = fit if asked.fit else Steps(asked.steps)
    with MISTAKES[mistake]():
        return measure(preset_config("tiny-llama"), asked, Target(folder, "abc"), Deadline(until), CPU, measure_one)


def exchanged(asked: Exchanging, folder: str, attention: bool, mistake: str = "") -> dict[str, Any] | None:
    with MISTAKES[mistake]():
        return (measure_attention if attention else measure_exchange)(asked, Target(folder), ENOUGH, CPU)


def test_steps_are_measured_and_written(run_ranks: RunRanks, tmp_path: Path) -> None:
    settings = settings_of(["-/graph/-", "16/x+O/-", "16/x,none/-"], [90])
    asked = Asked(Work("tiny-llama", 2), settings, steps=2)
    found, other = run_ranks(2, measured, asked, str(tmp_path), timeout_s=TIMEOUT_S)
    assert other is None
    assert json.loads(Path(found.pop("path")).read_text()) == json.loads(json.dumps(found))
    assert [row["memory"] for row in found["rows"]] == ["-/graph/-", "16/x+O/-", "16/x,none/-"]
    assert len(found["gates"]) == 3
    for row in found["rows"]:
        assert set(row) >= ROW_KEYS
        assert row["state"] == "done"
        assert found["gates"][row["gate"]]["ok"] and found["gates"][row["gate"]]["grad_rel_err"] < 1e-12
        assert len(row["steps"]) == len(row["losses"]) == 2
        assert row["step_s"] > 0
    assert found["asked"]["work"]["sp"] == found["gpus"] == 2
    assert found["figures"] == {}


def test_the_first_loss_is_that_of_the_plain_model(run_ranks: RunRanks, tmp_path: Path) -> None:
    asked = Asked(Work("tiny-llama", 2, seed=5), (Setting("16/x+O/-", 90),), steps=1)
    (row,) = run_ranks(2, measured, asked, str(tmp_path), timeout_s=TIMEOUT_S)[0]["rows"]
    model: Any = untrained_model(preset_config("tiny-llama"), 5, torch.float32, CPU)
    ids = random_tokens(384, 90, 5, 0)
    assert row["losses"] == [pytest.approx(model(input_ids=ids, labels=ids).loss.item(), abs=2e-5)]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-host"])
def test_one_process(run_ranks: RunRanks, tmp_path: Path, optimizer: str) -> None:
    asked = Asked(Work("tiny-llama", 1, optimizer=optimizer), (Setting("16/x+O/-", 60),), steps=2)
    found = run_ranks(1, measured, asked, str(tmp_path), timeout_s=TIMEOUT_S)[0]
    assert [row["state"] for row in found["rows"]] == ["done"]
    assert next(iter(found["gates"])).startswith("single" if optimizer == "adamw-host" else "fsdp2")


@pytest.mark.parametrize("mistake", ["", "adapters"])
def test_adapters_in_place_of_the_model(run_ranks: RunRanks, tmp_path: Path, mistake: str) -> None:
    pytest.importorskip("peft")
    adapter = AdapterConfig(kind="lora", rank=RANK)
    asked = Asked(Work("tiny-llama", 2, adapter=adapter), (Setting("16/x+O/-", 60),), steps=1)
    found = run_ranks(2, measured, asked, str(tmp_path), mistake, timeout_s=TIMEOUT_S)[0]
    ((name, proof),) = found["gates"].items()
    assert name == "fsdp2 110 16/x+O/- lora 4"
    assert proof["ok"] is (mistake == "")
    state = found["rows"][0]["state"]
    assert state.startswith("gate failed: document 2x1: grad_rel_err") if mistake else state == "done"
    written = json.loads(Path(found["path"]).read_text())
    assert written["asked"]["work"]["adapter"]["rank"] == RANK


def test_no_number_without_a_proof(run_ranks: RunRanks, tmp_path: Path) -> None:
    asked = Asked(Work("tiny-llama", 2), (Setting("16/x+O/-", 90), Setting("-/graph/-", 90)))
    found = run_ranks(2, measured, asked, str(tmp_path), "backward", timeout_s=TIMEOUT_S)[0]
    for row in found["rows"]:
        assert row["state"].startswith("gate failed: document 2x1: grad_rel_err")
        assert not {"step_s", "steps", "losses"} & set(row)
    assert not any(gate["ok"] for gate in found["gates"].values())


def test_a_setting_that_cannot_be_leaves_the_others(run_ranks: RunRanks, tmp_path: Path) -> None:
    asked = Asked(Work("tiny-llama", 2), settings_of(["16/x*3/-", "16/x/-"], [64]), steps=1)
    rows = run_ranks(2, measured, asked, str(tmp_path), timeout_s=TIMEOUT_S)[0]["rows"]
    assert rows[0]["state"] == "refused: keep lists 3 decisions, the model has 2 layers."
    assert rows[1]["state"] == "done"


def test_time_that_is_up_is_respected(run_ranks: RunRanks, tmp_path: Path) -> None:
    asked = Asked(Work("tiny-llama", 2), settings_of(["16/x/-"], [64, 96]), steps=2)
    rows = run_ranks(2, measured, asked, str(tmp_path), "", time.time() - 1, timeout_s=TIMEOUT_S)[0]["rows"]
    assert [row["state"] for row in rows] == ["stopped at the limit"] * 2
    assert not any("step_s" in row for row in rows)


def test_fit_measures_a_whole_step(run_ranks: RunRanks, tmp_path: Path) -> None:
    asked = Asked(Work("tiny-llama", 2), settings_of(["16/x,none/-"], [128, 256]), fit=True)
    rows = run_ranks(2, measured, asked, str(tmp_path), timeout_s=TIMEOUT_S)[0]["rows"]
    assert [(row["tokens"], row["state"]) for row in rows] == [(128, "done"), (256, "done")]
    assert all(row["seconds"] > 0 and row["host_gib"] > 0 for row in rows)


def weights_before_and_after_warm_up() -> tuple[bool, bool]:
    load = build(preset_config("tiny-llama"), Work("tiny-llama", 1), [parse_memory("16/x+O/-")], CPU)
    load.use(parse_memory("16/x+O/-"))
    before = [p.detach().full_tensor().clone() for p in load.module.parameters()]  # type: ignore[attr-defined]
    load.warm_up(64)
    warm = [p.detach().full_tensor() for p in load.module.parameters()]  # type: ignore[attr-defined]
    same = all(torch.equal(a, b) for a, b in zip(before, warm, strict=True))
    load.step(load.row(64, 0))
    after = [p.detach().full_tensor() for p in load.module.parameters()]  # type: ignore[attr-defined]
    return same, any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def used_memories() -> list[Any]:
    load = build(preset_config("tiny-llama"), Work("tiny-llama", 1), [parse_memory("16/x+O/-")], CPU)
    found = []
    for text in ("16/x+O/eager", "-/graph/-", "16/x/eager"):
        load.use(parse_memory(text))
        found.append((load.handle.memory, load.handle.compiler))
    return [[memory for memory, _ in found], found[0][1] is found[2][1] is not None, found[1][1] is None]


def test_a_setting_is_used(run_ranks: RunRanks) -> None:
    memories, kept, none = run_ranks(1, used_memories)[0]
    assert memories == [parse_memory(text) for text in ("16/x+O/eager", "-/graph/-", "16/x/eager")]
    assert kept and none


def predicted_to_take_long(folder: str) -> dict[str, Any]:
    setting, memory, work = Setting("16/x/-", 64), parse_memory("16/x/-"), Work("tiny-llama", 1)
    config = preset_config("tiny-llama")
    case = Case(setting, memory, small(config, work, memory, 64, CPU), {"predicted_s": 1e6})
    results = Results.open(Target(folder), "step", {}, CPU)
    row = results.begin({})
    Steps(1)(build(config, work, [memory], CPU), case, row, results, Deadline(time.time() + 1e5))
    return row


def pins_of_a_row(folder: str, way: str, reserves: bool) -> tuple[int, int, dict[str, Any]]:
    """Measure a row; return up to which byte memory was pinned before the long step, and in it."""
    setting = Setting("16/x+O/-/gpu=0,host=64MiB", 96)
    memory, work, pinned = parse_memory(setting.memory), Work("tiny-llama", 1), {True: 0, False: 0}
    case = Case(setting, memory, small(preset_config("tiny-llama"), work, memory, 96, CPU), {})
    load, long = build(preset_config("tiny-llama"), work, [memory], CPU), False
    right = Workload.step

    def step(self: Workload, ids: torch.Tensor, lr: float = 1e-5) -> float:
        nonlocal long
        long = ids.shape[1] == 96
        return right(self, ids, lr)

    def pin(self: HostMemory, start: int, stop: int) -> None:
        pinned[long] = max(pinned[long], stop)

    load.use(memory)
    with ExitStack() as patches:
        patches.enter_context(patch.object(Workload, "step", step))
        patches.enter_context(patch.object(HostMemory, "pin", pin))
        if not reserves:
            patches.enter_context(patch.object(Workload, "reserve"))
        results = Results.open(Target(folder), way, {}, CPU)
        row = results.begin({})
        {"step": Steps(1), "fit": fit}[way](load, case, row, results, ENOUGH)
    return pinned[False], pinned[True], row


@pytest.mark.parametrize("way", ["step", "fit"])
def test_host_memory_is_pinned_before_the_clock_starts(run_ranks: RunRanks, tmp_path: Path, way: str) -> None:
    ((before, within, row),) = run_ranks(1, pins_of_a_row, str(tmp_path), way, True)
    assert before == within > 0
    assert row["state"] == "done" and row["pinned_s"] >= 0
    ((before, within, _),) = run_ranks(1, pins_of_a_row, str(tmp_path), way, False)
    assert before < within


def test_what_would_take_too_long_is_not_begun(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(1, predicted_to_take_long, str(tmp_path)) == [{"state": "stopped at the limit"}]


def test_warming_up_changes_no_weight_and_a_step_changes_all(run_ranks: RunRanks) -> None:
    assert run_ranks(1, weights_before_and_after_warm_up) == [(True, False)]


@pytest.mark.parametrize(("tokens", "tiles"), [(400, 4), (32, 1), (20, 1)])
def test_the_check_runs_in_one_tile_where_the_benchmark_does(tokens: int, tiles: int) -> None:
    memory = parse_memory("16/x+O/eager")
    for device, tile in ((CPU, 16), (torch.device("cuda"), 96)):
        settings = small(preset_config("tiny-llama"), Work("tiny-llama", 2), memory, tokens, device).settings
        assert settings.memory is not None and settings.memory.tile_tokens == tile
        assert settings.seq_len is not None
        assert -(-settings.seq_len // (2 * tile)) == tiles
    assert (settings.ulysses, settings.ring, settings.engine) == (2, 1, "fsdp2")


def test_exchanges(run_ranks: RunRanks, tmp_path: Path) -> None:
    asked = Exchanging(2, Heads(6, 2, 8), payload_bytes=1 << 14, times=3)
    found = run_ranks(2, exchanged, asked, str(tmp_path), False)[0]
    assert [row["state"] for row in found["rows"]] == ["done"] * 4
    assert all(0 < row["median_ms"] <= row["p90_ms"] for row in found["rows"])
    wrong = run_ranks(2, exchanged, asked, str(tmp_path), False, "exchange")[0]
    assert len(wrong["rows"]) == 2
    assert all(r["state"].startswith("gate failed") and "median_ms" not in r for r in wrong["rows"])


def test_attention(run_ranks: RunRanks, tmp_path: Path) -> None:
    asked = Exchanging(2, Heads(6, 2, 8), tokens=300, times=2)
    found = run_ranks(2, exchanged, asked, str(tmp_path), True)[0]
    long = "packed, long documents"
    assert [(row["name"], row["way"], row["state"]) for row in found["rows"]] == [
        ("dense", "collectives", "done"),
        *((name, way, "done") for name in ("packed", long) for way in ("collectives", "gather")),
    ]
    assert all(row["share"] > 0 for row in found["rows"])
    assert all(row["exchange"].startswith("gather") for row in found["rows"] if row["way"] == "gather")
    assert all(1 <= row["imbalance"] <= 1.05 for row in found["rows"] if row["way"] == "gather")
    wrong = run_ranks(2, exchanged, asked, str(tmp_path), True, "borders")[0]
    assert [row["state"].split(":")[0] for row in wrong["rows"]] == ["done", *["gate failed"] * 4]
    wrong = run_ranks(2, exchanged, asked, str(tmp_path), True, "keys")[0]
    assert [row["state"].split(":")[0] for row in wrong["rows"]] == ["done", *["done", "gate failed"] * 2]


def test_attention_of_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run_ranks(1, exchanged, Exchanging(1, Heads(2, 1, 8), tokens=100, times=1), str(tmp_path), True)[0]
    assert [row["state"] for row in found["rows"]] == ["done"] * 5


def test_the_standard_packed_row_is_like_instruction_data() -> None:
    starts = document_starts(STANDARD_TOKENS, short_documents())
    lengths = sorted(b - a for a, b in pairwise((*starts, STANDARD_TOKENS)))
    assert len(lengths) == 72
    assert 1050 <= lengths[36] <= 1150
    assert lengths[-1] < STANDARD_TOKENS // 8


@dataclass(frozen=True)
class ForgetfulJob(WorkJob):
    """Runs out of memory on the second process at 66 tokens."""

    def run(self, device: Any) -> dict[str, Any] | None:
        right = Workload.step

        def step(self: Workload, ids: torch.Tensor, lr: float = 1e-5) -> float:
            if ids.shape[1] == 66 and dist.get_rank() == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
            return right(self, ids, lr)

        with patch.object(Workload, "step", step):
            return super().run(device)


def test_what_does_not_fit_leaves_the_settings_after_it(tmp_path: Path) -> None:
    asked = Asked(Work("tiny-llama", 2), settings_of(["16/x/-"], [64, 66, 96]), steps=1)
    run = commands.Run(StepFlags(out=str(tmp_path / "out")), str(tmp_path))
    with patch.object(commands, "WorkJob", ForgetfulJob):
        (found,) = commands._measured(asked, "cpu", run, "step")
    fates = [(row["tokens"], row["state"]) for row in found["rows"]]
    assert fates == [(64, "done"), (66, "out of memory"), (96, "done")]
    assert Results.load(Path(found["path"])).rows == found["rows"]


def cli(*arguments: str, torchrun: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    command = [sys.executable, *start, "-m", "longspan", "bench", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **environment}
    )


STEP = ("step", "--model", "tiny-llama", "--seq-len", "96", "--memory", "16/x+O/-", "--steps", "1", "--json")


@pytest.mark.parametrize("torchrun", [False, True])
def test_the_command_measures_and_prints_json_alone(tmp_path: Path, torchrun: bool) -> None:
    sp = () if torchrun else ("--sp", "2")
    done = cli(*STEP, *sp, "--out", str(tmp_path), "--commit", "abc", torchrun=torchrun)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["gpus"], found["commit"], found["rows"][0]["state"]) == (2, "abc", "done")
    assert Results.load(Path(found["path"])).rows == found["rows"]
    assert "GATE fsdp2" in done.stderr and "STEP" in done.stderr


def test_a_run_that_is_stopped_keeps_its_rows(tmp_path: Path) -> None:
    done = cli("step", "--model", "tiny-llama", "--seq-len", "96,128", "--memory", "16/x+O/-", "--steps", "9999",
               "--sp", "1", "--limit-s", "40", "--json", "--out", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert 0 < len(rows[0]["steps"]) < 9999
    assert rows[0]["state"] == "done"
    assert len(rows[1].get("steps", ())) < 9999


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("step --seq-len 9,x", "--seq-len x is not a size"),
        ("step --profile", "--profile looks at what a GPU does"),
        ("step --memory 8/x", "A memory setting is TILE/KEEP/COMPILE"),
        ("step --host-memory 8", "--host-memory 8 is 8 bytes"),
        ("step --engine zero3", "--engine must be auto, single, fsdp2, zero-1"),
        ("exchange --sp 1", "nothing to exchange between 1 process"),
        ("exchange --sp 2 --heads 4:2", "--heads is three numbers"),
        ("fit --seq-len 1K,2K --search", "--search takes one"),
        ("table --page nowhere.md", "There is no page nowhere.md"),
    ],
)
def test_what_cannot_be_starts_nothing(tmp_path: Path, command: str, message: str) -> None:
    out = [] if command.startswith("table") else ["--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["bench", *command.split(), *out])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()

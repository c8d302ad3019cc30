"""A run that was killed goes on as if nothing had happened: the same losses to the bit."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import yaml
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from longspan.config import RunConfig
from longspan.errors import ConfigError, TrainingError
from longspan.optim.host import local
from longspan.optim.low_bit import is_packed
from longspan.train import state, writing
from longspan.train.checkpoints import Checkpoints
from longspan.train.writing import Writing
from pool import RunRanks
from runs import STEPS, config_of, result, run

pytestmark = pytest.mark.dist

LORA = {"kind": "lora", "rank": 3, "dropout": 0.3}

WIDE = {"hidden_size": 32, "intermediate_size": 385, "num_hidden_layers": 2, "vocab_size": 512}
BITS: dict[str, Any] = {
    "optimizer": {"kind": "adamw8bit", "lr": 3e-3, "weight_decay": 0.1},
    "model": {"name": "tiny-llama", "init": "random", "overrides": WIDE},
}
"""Where two processes divide the model, some states are of 8 bits on both, some on one, some on none."""

KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2, dp2": {"sequence_parallel_size": 1},
    "ddp": {"engine": "ddp"},
    "fsdp2 lora": {"adapter": LORA},
    "ddp lora ring": {"engine": "ddp", "adapter": LORA, "ring_degree": 2},
    "fsdp2 host": {"optimizer": {"kind": "adamw-host", "lr": 3e-3}},
    "fsdp2 8 bits": BITS,
    "ddp 8 bits": BITS | {"engine": "ddp"},
    "fsdp2 streamed": {"memory": {"keep": "x", "tile_tokens": 7}, "adapter": LORA},
    "zero-1": {"engine": "zero-1"},
    "zero-3": {"engine": "zero-3"},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_killed_run_goes_on_to_the_bit(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    """Killed in its fifth step, when the fourth is saved and the metrics of the fourth are written."""
    if "zero" in kind:
        pytest.importorskip("deepspeed")
    if "8 bits" in kind:
        pytest.importorskip("torchao")
    changes = KINDS[kind]
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    run_ranks(2, run, config_of(whole, **changes, save={"every": None}))
    assert not (tmp_path / "whole" / "checkpoints").exists()
    assert run_ranks(2, run, config_of(cut, **changes), 4)[0][0] == 3
    assert [row[0] for row in result(cut)[0]] == [1, 2, 3]
    (last, told), _ = run_ranks(2, run, config_of(cut, **changes, resume=True))
    assert last == STEPS and "going on after step 2" in told
    assert result(cut) == result(whole)
    names = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]


def test_one_process_goes_on(tmp_path: Path) -> None:
    """Without a process group; stepping inside backward clips by the step before, which is saved too."""
    inside = {"step_in_backward": True, "clip": "previous", "max_grad_norm": 0.5, "lr": 3e-3}
    for name, optimizer in (("plain", {"lr": 3e-3}), ("inside", inside), ("float64", inside)):
        whole, cut = str(tmp_path / name / "whole"), str(tmp_path / name / "cut")
        changes: dict[str, Any] = {"engine": "single", "sequence_parallel_size": 1, "optimizer": optimizer}
        changes["gradient_accumulation_steps"] = 1
        if name == "float64":
            changes["model"] = {**config_of(whole).model.model_dump(), "dtype": "float64"}
        run(config_of(whole, **changes))
        run(config_of(cut, **changes), 4)
        assert run(config_of(cut, **changes, resume=True))[0] == STEPS
        assert result(cut) == result(whole)


def run_with_kinds(config: RunConfig) -> dict[str, bool]:
    """Train; return which of some parameters' states were of 8 bits where this process wrote them."""
    kinds: dict[str, bool] = {}
    plain = state.saved_state

    def saved(found: Any) -> Any:
        value = found["exp_avg"]
        kinds[str(list(value.shape))] = is_packed(local(value))
        return plain(found)

    with patch.object(state, "saved_state", saved):
        run(config)
    return kinds


def test_a_run_with_8_bit_states_goes_on_on_other_processes(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Blocks are cut anew, so values are rounded once more: near what the run would have come to, and not the same."""
    pytest.importorskip("torchao")
    changes, whole, cut = KINDS["fsdp2 8 bits"], str(tmp_path / "whole"), str(tmp_path / "cut")
    first, second = run_ranks(2, run_with_kinds, config_of(whole, **changes))
    kinds = {shape: (first[shape], second[shape]) for shape in ("[512, 32]", "[385, 32]", "[32, 385]")}
    assert kinds == {"[512, 32]": (True, True), "[385, 32]": (False, True), "[32, 385]": (False, False)}
    run_ranks(2, run, config_of(cut, **changes), 4)
    expected = result(whole)[0]
    for name, (world, more) in {
        "four": (4, {"gradient_accumulation_steps": 1}),
        "ddp": (2, {"engine": "ddp"}),
        "one": (1, {"engine": "fsdp2", "sequence_parallel_size": 1}),
    }.items():
        shutil.copytree(cut, folder := str(tmp_path / name))
        assert run_ranks(world, run, config_of(folder, **changes | more, resume=True))[0][0] == STEPS
        for found, wanted in zip(result(folder)[0], expected, strict=True):
            assert found == pytest.approx(wanted, rel=2e-3), name


def test_another_world_goes_on(run_ranks: RunRanks, tmp_path: Path) -> None:
    """From two processes that share rows to one, to two replicas, and to four of both; the same steps, but rounding."""
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    run_ranks(2, run, config_of(whole))
    run_ranks(2, run, config_of(cut), 4)
    others = {
        "one": (1, {"sequence_parallel_size": 1, "engine": "fsdp2"}),
        "replicas": (2, {"sequence_parallel_size": 1, "gradient_accumulation_steps": 1}),
        "ddp": (2, {"engine": "ddp", "ring_degree": 2}),
        "four": (4, {"sequence_parallel_size": 2, "gradient_accumulation_steps": 1}),
    }
    expected = result(whole)[0]
    for name, (world, changes) in others.items():
        folder = str(tmp_path / name)
        shutil.copytree(cut, folder)
        assert run_ranks(world, run, config_of(folder, **changes, resume=True))[0][0] == STEPS
        for found, wanted in zip(result(folder)[0], expected, strict=True):
            assert found == pytest.approx(wanted, rel=2e-5), name


def test_a_stopped_run_is_saved(run_ranks: RunRanks, tmp_path: Path) -> None:
    """SIGTERM on one process: all finish the step, save it, and leave; without a checkpoint asked for, too."""
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    run_ranks(2, run, config_of(whole, save={"every": None}))
    (last, told), (other, _) = run_ranks(2, run, config_of(cut, save={"every": None}), 0, 3)
    assert last == other == 3 and "stopped by SIGTERM after step 3" in told
    assert not (tmp_path / "cut" / "model").exists()
    assert run_ranks(2, run, config_of(cut, save={"every": None}, resume=True))[0][0] == STEPS
    assert result(cut) == result(whole)


def spoil(folder: Path, how: str) -> str:
    """Damage a checkpoint; return what should be said of it."""
    if how == "marker":
        (folder / "commit.json").unlink()
        return "has no commit.json, so it was not finished"
    if how == "half a marker":
        text = (folder / "commit.json").read_text()
        (folder / "commit.json").write_text(text[: len(text) // 2])
        return "its commit.json cannot be read"
    tensors = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    size = tensors.stat().st_size
    if how == "gone":
        tensors.unlink()
        return f"{tensors.name} is missing where {size:,} were written"
    os.truncate(tensors, size // 2)
    return f"{tensors.name} has {size // 2:,} bytes where {size:,} were written"


def test_half_a_checkpoint_is_left_out(run_ranks: RunRanks, tmp_path: Path) -> None:
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    run_ranks(2, run, config_of(whole))
    run_ranks(2, run, config_of(cut), 6)
    for how in ("marker", "half a marker", "gone", "truncated"):
        folder = tmp_path / how
        shutil.copytree(cut, folder)
        expected = spoil(folder / "checkpoints" / "step-00000004", how)
        (_, told), _ = run_ranks(2, run, config_of(str(folder), resume=True))
        assert "checkpoint step-00000004 is left out" in told and expected in told
        assert "going on after step 2" in told
        assert result(str(folder)) == result(whole)


def test_without_a_checkpoint_a_run_begins(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = str(tmp_path / "new")
    (last, told), _ = run_ranks(2, run, config_of(folder, resume=True, max_steps=2))
    assert last == 2 and "no checkpoint to go on from" in told


def refused(config: RunConfig) -> str:
    try:
        run(config)
    except (ConfigError, TrainingError) as error:
        return str(error)
    return ""


def test_another_run_is_not_gone_on_with(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(2, run, config_of(folder, max_steps=2))
    for changes, named in (
        ({"seed": 3}, "seed was 0, here it is 3"),
        ({"optimizer": {"kind": "adamw-host"}}, "optimizer.kind was adamw, here it is adamw-host"),
        ({"sequence_length": 63}, "sequence_length was 64"),
        ({"engine": "zero-1"}, "engine was of torch, here it is zero-1"),
    ):
        for said in run_ranks(2, refused, config_of(folder, resume=True, **changes)):
            assert named in said and "another output_dir" in said


def full_disk(folder: str) -> tuple[str, list[str]]:
    """Save step 2; at step 4 one process finds its disk full."""
    plain = Writing._write

    def write(writing: Writing) -> None:
        if "00000004" in str(writing._writer.path) and dist.get_rank() == 1:
            writing._written.set_exception(OSError(28, "No space left on device"))
        else:
            plain(writing)

    with patch.object(Writing, "_write", write):
        said = refused(config_of(folder))
    return said, sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def test_a_full_disk_leaves_the_last_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    for said, names in run_ranks(2, full_disk, str(tmp_path / "run")):
        assert "process 1 says OSError" in said and "No space left" in said
        assert "step-00000002" in names and "step-00000004" not in names
    (last, told), _ = run_ranks(2, run, config_of(str(tmp_path / "run"), resume=True))
    assert last == STEPS and "going on after step 2" in told


PLACES = {
    "plan": (Writing, "_plan", 1),
    "copy": (writing._Planner, "stage", 1),
    "look": (Checkpoints, "_latest", 0),
    "read": (state, "_vessels", 1),
    "take": (state, "_take", 1),
    "table": (Writing, "complete", 0),
}


def failing(config: RunConfig, place: str) -> str:
    """Train; one process fails where the others go on to a collective."""
    holder, name, rank = PLACES[place]

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, "Input/output error")

    with patch.object(holder, name, broken) if dist.get_rank() == rank else nullcontext():
        return refused(config)


def test_where_one_process_fails_none_waits(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(2, run, config_of(folder, max_steps=2))
    for place, (*_, rank) in PLACES.items():
        for said in run_ranks(2, failing, config_of(folder, resume=True), place):
            assert f"process {rank} says OSError: [Errno 5]" in said, place
    (last, told), _ = run_ranks(2, run, config_of(folder, resume=True))
    assert last == STEPS and "going on after step 2" in told


class Unwelcome:
    """Would run code while a table is read."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_table_runs_no_code(tmp_path: Path) -> None:
    from longspan.train.state import _Reader

    home = "torch.distributed.checkpoint.filesystem"
    dotted = f"\x8c{chr(len(home))}{home}\x8c\x09os.system\x93\x8c\x04true\x85R.".encode("latin-1")
    for payload, named in (
        (pickle.dumps(Unwelcome()), "posix.system"),
        (b"\x80\x04" + dotted, f"{home}.os.system"),
        (pickle.dumps(SerializationFormat.SAFETENSORS), f"{home}.SerializationFormat"),
        (pickle.dumps(BytesStorageMetadata()), "torch.distributed.checkpoint.metadata.BytesStorageMetadata"),
    ):
        (tmp_path / ".metadata").write_bytes(payload)
        with pytest.raises(TrainingError, match=f"{named}, which no checkpoint does"):
            _Reader(tmp_path).read_metadata()


def test_a_table_names_tensors_alone(tmp_path: Path) -> None:
    """What else it could name would be unpickled."""
    from longspan.train.state import _Reader

    table = Metadata({"model.a": MetadataIndex("x")})  # pyright: ignore[reportArgumentType]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(TrainingError, match="model.a is a MetadataIndex where all are tensors"):
        _Reader(tmp_path).read_metadata()


def test_a_run_past_its_end_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"engine": "single", "sequence_parallel_size": 1}
    run(config_of(str(tmp_path), **changes, max_steps=4))
    said = refused(config_of(str(tmp_path), **changes, max_steps=3, resume=True))
    assert "max_steps is 3" in said and "step 4" in said


def closings(folder: str) -> int:
    """Train with DeepSpeed; return how often its engine is let go of."""
    from longspan.engines import Zero

    count, plain = 0, Zero.close

    def close(self: Zero) -> None:
        nonlocal count
        count += 1
        plain(self)

    with patch.object(Zero, "close", close):
        run(config_of(folder, engine="zero-2", max_steps=2, save={"final": False, "every": None}))
    return count


def test_an_engine_is_closed_with_its_run(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    assert run_ranks(2, closings, str(tmp_path / "run")) == [1, 1]


def started(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run of two processes on the command line."""
    (folder / "a.txt").write_text("def double(x):\n    return 2 * x\n" * 30)
    file = folder / "run.yaml"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 257}
    model = {"name": "tiny-llama", "init": "random", "overrides": sizes}
    data = {"files": str(folder / "a.txt"), "long_documents": "split"}
    values = {"model": model, "data": data, "sequence_length": 64, "output_dir": str(folder / "out")}
    file.write_text(yaml.safe_dump({**values, "sequence_parallel_size": 2}))
    command = [sys.executable, "-m", "longspan", "train", str(file), "--nproc", "2", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
def test_sigterm_to_the_command(tmp_path: Path) -> None:
    """It ends with code 0 and a checkpoint, and the same command with --resume goes on."""
    process, metrics = started(tmp_path, "--max-steps", "100000"), tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGTERM)  # and so to all of them, as schedulers do
    out, err = process.communicate(timeout=20)  # torch's launcher would wait for 30 s
    assert process.returncode == 0, (out, err)
    steps = metrics.read_text().count("\n")
    assert f"stopped by SIGTERM after step {steps}" in out and out.splitlines()[-1].startswith("output_dir:")
    process = started(tmp_path, "--max-steps", str(steps + 2), "--resume")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and f"going on after step {steps}" in out, (out, err)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, steps + 3))
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()

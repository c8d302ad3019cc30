"""The commands of docs/launching.md that need no GPU run as they are written, and compute what one process does."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
import torch.distributed as dist

from longspan.cli import main
from ports import free_ports

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--master-port"),
    "accelerate launch": ("accelerate.commands.launch", "--main_process_port"),
    "deepspeed": ("deepspeed.launcher.runner", "--master_port"),
}
"""What a launcher is called inside Python, and how it is told a port."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "DS_BUILD_OPS": "0"}
TRAINER = [
    *("--max_steps", "2", "--gradient_accumulation_steps", "2", "--logging_steps", "1", "--save_strategy", "no"),
    *("--per_device_train_batch_size", "1", "--disable_tqdm", "true"),
]
RUN = [
    "--data-files",
    "${stdlib}/bisect.py",
    "--sequence-length",
    "256",
    "--max-steps",
    "2",
    "--schedule-warmup-steps",
    "0",
    "--no-save-final",
]


def documented(launcher: str, what: str, *more: str) -> str:
    """Run the page's command, with arguments that replace its own, and return what it prints."""
    pattern = rf"(\w+=\w+ )*{launcher} .*2 {what}"
    (line,) = [line for line in PAGE.splitlines() if re.match(pattern, line)]
    values, rest = line.split(f"{launcher} ")
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(free_ports(1)[0]), *shlex.split(rest), *more]
    environment = os.environ | ENVIRONMENT | dict(value.split("=") for value in values.split())
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def last_json(text: str) -> dict[str, Any]:
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def script(name: str, *arguments: str) -> dict[str, Any] | None:
    """Run an example in a process of the pool, in the group that it has; return what the first process prints."""
    from trainers import Case, accelerated

    group = patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT)
    said = io.StringIO()
    with accelerated(Case()), group, patch.object(sys, "argv", [name, *arguments]), redirect_stdout(said):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return last_json(said.getvalue()) if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def one_process(run_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("one"))
    alone = ("--use_cpu", "--report_to", "none", "--sequence_parallel_size", "1", "--output_dir", folder)
    return run_ranks(1, script, "trainer.py", *alone, *TRAINER)[0]


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate launch"])
def test_trainer_script(launcher: str, one_process: dict[str, Any], tmp_path: Path) -> None:
    found = last_json(documented(launcher, "examples/trainer.py --use_cpu", *TRAINER, "--output_dir", str(tmp_path)))
    assert found["losses"] == pytest.approx(one_process["losses"], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(one_process["eval_loss"], rel=1e-5)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_starts_a_run(tmp_path: Path) -> None:
    """With the --local_rank that it adds."""
    both, alone = tmp_path / "both", tmp_path / "alone"
    said = documented("deepspeed", "--module longspan train", *RUN, "--output-dir", str(both))
    assert "--local_rank=1" in said and "on 2 cpu processes" in said and f"\noutput_dir: {both}\n" in said
    file = str(ROOT / "examples" / "quickstart.yaml")
    with suppress(SystemExit):  # as all commands end
        main(["train", file, *RUN, "--output-dir", str(alone), "--nproc", "1", "--sequence-parallel-size", "1"])
    losses = [
        [json.loads(row)["loss"] for row in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (both, alone)
    ]
    assert len(losses[0]) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_preferences(run_ranks: Any) -> None:
    pytest.importorskip("trl", reason="the example takes TRL's batches")
    expected, found = (run_ranks(world, script, "trl_dpo.py")[0] for world in (1, 2))
    assert len(found["losses"]) == 4 and found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "slurm").glob("*.sbatch")), ids=lambda file: file.name)
def test_slurm_script_is_a_script(file: Path) -> None:
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

"""The examples run under the launchers that docs/launching.md names, and compute what one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TRAINER = [
    "examples/trainer.py",
    *("--use_cpu", "--max_steps", "2", "--gradient_accumulation_steps", "2", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "1", "--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29613"]
ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "29614"),
]


def last_line(command: list[str]) -> dict[str, object]:
    """Run a command in the repository, and return the JSON at the end of what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = str(tmp_path_factory.mktemp("one"))
    return last_line([sys.executable, *TRAINER, "--output_dir", folder, "--sequence_parallel_size", "1"])


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate launch"])
def test_trainer_script(launcher: list[str], one_process: dict[str, object], tmp_path: Path) -> None:
    found = last_line([*launcher, *TRAINER, "--output_dir", str(tmp_path), "--sequence_parallel_size", "2"])
    assert found["losses"] == pytest.approx(one_process["losses"], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(one_process["eval_loss"], rel=1e-5)
    assert (tmp_path / "model.safetensors").exists()


def test_preferences() -> None:
    pytest.importorskip("trl", reason="the example takes TRL's batches")
    expected = last_line([sys.executable, "examples/trl_dpo.py"])
    found = last_line([*TORCHRUN, "examples/trl_dpo.py"])
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "slurm").glob("*.sbatch")), ids=lambda file: file.name)
def test_slurm_script_is_a_script(file: Path) -> None:
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

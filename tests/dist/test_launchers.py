"""The commands of docs/launching.md that need no GPU run as they are written, and compute what one process does."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import scripts
from longspan.cli import main

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
PROGRAMS = {
    "torchrun": ("torch.distributed.run", "--master-port"),
    "accelerate launch": ("accelerate.commands.launch", "--main_process_port"),
    "deepspeed": ("deepspeed.launcher.runner", "--master_port"),
}
"""What a launcher is called inside Python, and its option for a port, so that other tests may run beside it."""
TRAINER = [
    *("--max_steps", "2", "--gradient_accumulation_steps", "2", "--logging_steps", "1"),
    *("--per_device_train_batch_size", "1", "--save_strategy", "no", "--disable_tqdm", "true"),
]
RUN = [
    *("--sequence-length", "256", "--max-steps", "2", "--schedule-warmup-steps", "0", "--gradient-accumulation-steps"),
    *("1", "--save-final", "false", "--logging-to", "[]"),
]


def output_of(begins: str, folder: Path, more: list[str], port: int) -> str:
    """Run the page's command that begins so, in small, and return what it prints.

    Args:
        more: arguments that come last, and so replace those of the page.
    """
    (line,) = [line for line in COMMANDS if line.startswith(begins)]
    words = shlex.split(line)
    settings = dict(word.split("=") for word in words if re.fullmatch(r"[A-Z_]+=\w+", word))
    words = words[len(settings) :]
    launcher = next(name for name in PROGRAMS if line.split("=cpu ")[-1].startswith(name))
    module, option = PROGRAMS[launcher]
    command = [sys.executable, "-m", module, option, str(port), *words[len(launcher.split()) :], *more]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_BUILD_OPS": "0",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment | settings, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def last_line(text: str) -> dict[str, Any]:
    """Return the JSON at the end of what a script prints."""
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])

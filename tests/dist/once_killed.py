"""`longspan`, in which a process kills itself in the sixth step, once; for torchrun to start again."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from longspan.cli import main
from longspan.train import loop

plain = loop.run_step


def step(trainee: Any, data: Any, number: int, *rest: Any) -> Any:
    """Take a step, or die."""
    if number == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(trainee, data, number, *rest)


loop.run_step = step
main(sys.argv[1:])

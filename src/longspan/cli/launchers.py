"""Know what launcher has started this process: whichever it was, the environment is then as torchrun makes it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from longspan.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = range(20000, 30000)
"""Below those that Linux gives to programs that ask for any."""


def launched() -> bool:
    """Whether a launcher started this process as one of those of a run; the environment then says all of `_NEEDED`.

    torchrun and accelerate set it themselves, and deepspeed calls one of it by another name. Under srun the tasks of a
    step are the processes; a step of one task, as a batch script, starts processes of its own, or torchrun.

    Raises:
        ConfigError: something is missing, the tasks of a node do not follow each other, or the first node's name is
            unknown here.
    """
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        os.environ.update(of_slurm(os.environ))
        _check_address(os.environ["MASTER_ADDR"])
    if "RANK" not in os.environ:
        return False
    if "LOCAL_SIZE" in os.environ:  # deepspeed's name
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK is set, as for one process of several, but {', '.join(missing)} is not: start with torchrun, "
            "accelerate launch, deepspeed or srun, or unset RANK to have processes started here."
        )
    return True


def of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would have set for a task of srun's; an address or port that is set stays.

    Raises:
        ConfigError: a variable of Slurm's is missing, or the tasks of a node do not follow each other.
    """

    def told(name: str) -> str:
        if name not in environment:
            raise ConfigError(
                f"srun started this process as one of {environment['SLURM_STEP_NUM_TASKS']} tasks, but {name} is not "
                "set: have srun hand its environment on (--export=ALL), or start one torchrun per node."
            )
        return environment[name]

    here = [int(task) for task in told("SLURM_GTIDS").split(",")]
    if here != list(range(here[0], here[0] + len(here))):
        raise ConfigError(
            f"Tasks {here} share a node: those of a node must follow each other, so that what they exchange stays "
            "within it. Start with srun --distribution=block."
        )
    port = _PORTS[(int(told("SLURM_JOB_ID")) + 1009 * int(told("SLURM_STEP_ID"))) % len(_PORTS)]
    return {
        "RANK": told("SLURM_PROCID"),
        "WORLD_SIZE": told("SLURM_STEP_NUM_TASKS"),
        "LOCAL_RANK": told("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node(told("SLURM_STEP_NODELIST")),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def first_node(text: str) -> str:
    """Return the first of Slurm's list of nodes, such as `gpu[003-005,7],login`."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])+", text)
    if first is None:
        raise ConfigError(f"SLURM_STEP_NODELIST is {text!r}, which names no node; set MASTER_ADDR.")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", first.group())


def _check_address(name: str) -> None:
    """Refuse a name that this host cannot look up: torch would try for as long as the first step may take."""
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise ConfigError(
            f"The first node of the step is {name}, which {socket.gethostname()} cannot look up ({error}): set "
            "MASTER_ADDR to an address of it that all nodes reach."
        ) from None


def without_local_rank(arguments: list[str]) -> list[str]:
    """Leave out the --local_rank=N that deepspeed puts before all arguments, where the environment says the same."""
    first = re.fullmatch(r"--local[_-]rank=(\d+)", arguments[0]) if arguments else None
    return arguments[1:] if first and first[1] == os.environ.get("LOCAL_RANK") else arguments

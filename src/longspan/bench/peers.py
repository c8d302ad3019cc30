"""Other systems on the same work, each in a script of its own that prints one JSON object per row."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from longspan.bench.results import DONE, STOPPED
from longspan.bench.settings import Asked

ROW = "ROW "
_TAIL = 300


@dataclass(frozen=True)
class Peer:
    """A system to measure against.

    Args:
        module: what must be importable.
        script: below the folder of peers.
    """

    name: str
    module: str
    script: str


PEERS = (Peer("ringmaster", "ringmaster", "ringmaster.py"), Peer("DeepSpeed ALST", "deepspeed", "alst.py"))


def command(peer: Peer, folder: Path, asked: Asked, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a peer on the same model, lengths, steps and tokens."""
    work = asked.work
    lengths = dict.fromkeys(setting.tokens for setting in asked.settings)
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.sp),
        str(folder / peer.script), "--model", work.model, "--steps", str(asked.steps), "--seed", str(work.seed),
        *([] if work.layers is None else ["--layers", str(work.layers)]),
        *options, "--seq-len", *(str(n) for n in lengths),
    ]  # fmt: skip


def run_peer(
    peer: Peer, folder: Path, asked: Asked, limit_s: float | None, options: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run a peer and return its rows; a row without numbers says why there are none.

    Args:
        limit_s: it is ended after so long; the rows that it had are returned.
    """
    if importlib.util.find_spec(peer.module) is None:
        return [{"system": peer.name, "state": f"not installed: no module {peer.module}"}]
    output, code = finished(command(peer, folder, asked, options), limit_s)
    rows = rows_of(output, peer)
    if code is None:
        rows.append({"system": peer.name, "state": STOPPED})
    elif code:
        rows.append({"system": peer.name, "state": f"failed with exit code {code}: {output[-_TAIL:]}"})
    return rows


def finished(words: Sequence[str], limit_s: float | None) -> tuple[str, int | None]:
    """Run a command and return what it printed, and its exit code: None if it was ended at the limit."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return process.communicate(timeout=limit_s)[0], process.returncode
    except subprocess.TimeoutExpired:
        _end(process.pid)
        return process.communicate()[0], None
    except BaseException:
        _end(process.pid)
        raise


def _end(pid: int) -> None:
    """End a process and those it has started, which torchrun puts into sessions of their own."""
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def rows_of(output: str, peer: Peer) -> list[dict[str, Any]]:
    """Return the rows that a script printed; of a length, the last."""
    rows: dict[int, dict[str, Any]] = {}
    for line in output.splitlines():
        if line.startswith(ROW):
            row = {"system": peer.name, "state": DONE, **json.loads(line[len(ROW) :])}
            rows[row["tokens"]] = row
    return list(rows.values())

"""The file of a benchmark: written anew after every row, so that a run that is stopped keeps what it has."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.cuda import nccl

from longspan.bench.figures import figures_of
from longspan.files import write_whole
from longspan.versions import installed

RUNNING, DONE, STOPPED, OUT_OF_MEMORY = "running", "done", "stopped at the limit", "out of memory"
_PACKAGES = ("transformers", "flash-attn-4", "torchao", "longspan")


@dataclass(frozen=True)
class Target:
    """Where results go.

    Args:
        folder: of result files; a file is named by what it measured, the GPUs and the date.
        commit: of longspan.
        command: what was asked for.
        pointer: where to leave the file's path for the process that started this one; if it names a file already,
            rows are added to that.
    """

    folder: str
    commit: str = ""
    command: str = ""
    pointer: str | None = None


class Results:
    """What rank 0 has measured so far; on other ranks nothing is kept or written.

    A file holds the environment, `figures` by name, `gates` (what was proven before measuring) and `rows`.
    """

    def __init__(self, path: Path | None, content: dict[str, Any]) -> None:
        self.path, self.content = path, content

    @classmethod
    def open(cls, target: Target, what: str, asked: Any, device: torch.device) -> Results:
        """Begin a file, or go on with the one that the pointer names.

        Args:
            asked: settings, a dataclass.
        """
        if dist.is_initialized() and dist.get_rank():
            return cls(None, _content({}, {}))
        pointer = None if target.pointer is None else Path(target.pointer)
        if pointer is not None and pointer.exists():
            return cls.load(Path(pointer.read_text(encoding="utf-8")))
        about = environment(what, target, device)
        path = _fresh(Path(target.folder), f"{what}_{_gpu_name(about)}_{about['date']}")
        results = cls(path, _content(about, TypeAdapter(type(asked)).dump_python(asked, mode="json")))
        results.save()
        if pointer is not None:
            pointer.write_text(str(path), encoding="utf-8")
        return results

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file."""
        return cls(path, json.loads(path.read_text(encoding="utf-8")))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was measured, in order."""
        return self.content["rows"]

    @property
    def gates(self) -> dict[str, dict[str, Any]]:
        """Verdicts by the name of what was checked."""
        return self.content["gates"]

    def begin(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a row that is about to be measured; its `state` changes when it is."""
        row = {**row, "state": RUNNING}
        self.rows.append(row)
        self.save()
        return row

    def save(self) -> None:
        """Write the file, whole."""
        self.content["figures"] = figures_of(self.content)
        if self.path is not None:
            write_whole(self.path, json.dumps(self.content, indent=1) + "\n")

    def end_running(self, state: str) -> dict[str, Any] | None:
        """Say what became of a row that a process has not finished; return it."""
        running = next((row for row in self.rows if row["state"] == RUNNING), None)
        if running is not None:
            running["state"] = state
        self.save()
        return running


def environment(what: str, target: Target, device: torch.device) -> dict[str, Any]:
    """Describe where and with what something is measured."""
    on_gpu = device.type == "cuda"
    about: dict[str, Any] = {
        "what": what,
        "command": target.command,
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "gpus": dist.get_world_size() if dist.is_initialized() else 1,
        "torch": str(torch.__version__),
    }
    if on_gpu:
        about["cuda"] = torch.version.cuda
        about["nccl"] = ".".join(str(part) for part in nccl.version())
    about |= {name: version for name in _PACKAGES if (version := installed(name)) is not None}
    return {**about, "commit": target.commit, "date": time.strftime("%Y-%m-%d")}


def _content(about: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    return {**about, "figures": {}, "asked": asked, "gates": {}, "rows": []}


def _gpu_name(about: dict[str, Any]) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower().replace("nvidia", "")).strip("-")
    return f"{name}x{about['gpus']}" if about["gpus"] > 1 else name


def _fresh(folder: Path, stem: str) -> Path:
    """Return a path that no earlier result has."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while (path := folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")).exists():
        number += 1
    return path

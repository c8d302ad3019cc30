"""Checkpoints of DeepSpeed's engines are pickles; reading one runs nothing that is in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.engines.zero import Zero, reading_records
from longspan.errors import TrainingError

pytest.importorskip("deepspeed")


class Files:
    """DeepSpeed's, which would run what it reads."""

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=False)


class Engine:
    def __init__(self) -> None:
        self.checkpoint_engine = Files()

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, Any]:
        return folder, self.checkpoint_engine.load(f"{folder}/{tag}.pt", map_location="cpu")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def zero_on(engine: Any) -> Zero:
    zero = Zero(1)
    zero.engine = engine
    return zero


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"weights": torch.ones(2), "state": Evil(mark)}, tmp_path / "step.pt")
    engine = Engine()
    with pytest.raises(TrainingError, match=r"step.pt holds posix.mkdir, which no checkpoint of ours does"):
        zero_on(engine).load(tmp_path)
    assert not mark.exists()
    assert "load" not in vars(engine.checkpoint_engine)
    engine.load_checkpoint(str(tmp_path), "step")  # as DeepSpeed would have read it
    assert mark.exists()


def test_what_deepspeed_writes_is_read(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    state = {
        "stage": ZeroStageEnum(2),
        "scaler": LossScaler(scale=1),
        "fragments": {"w": fragment_address(numel=3, start=1)},
        "tensor": torch.arange(3),
        "plain": [1, 2.5, "text", None, {"a": (1,)}],
    }
    torch.save(state, tmp_path / "step.pt")
    found = zero_on(Engine()).load(tmp_path)
    assert torch.equal(found.pop("tensor"), torch.arange(3))
    assert found.pop("scaler").cur_scale == 1
    assert found == {name: state[name] for name in ("stage", "fragments", "plain")}


def test_the_engine_reads_as_before_where_reading_fails() -> None:
    engine = Engine()
    with pytest.raises(ZeroDivisionError), reading_records(engine):
        _ = 1 / 0
    assert "load" not in vars(engine.checkpoint_engine)

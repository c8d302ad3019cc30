"""What a run leaves of itself beside its metrics, whichever way it ends, and where else its steps go."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longspan.cli import launch
from longspan.config import parse_config
from longspan.errors import ConfigError, TrainingError
from longspan.mesh import Mesh
from longspan.plan.plan import Plan
from longspan.report import read_facts
from longspan.train import loggers
from longspan.train.checkpoint import check_output, clear_output
from longspan.train.loggers import check_loggers, chosen, scalars
from longspan.train.progress import Progress
from longspan.train.record import Record
from test_metrics import row

PLAN = Plan(1, 1, 1, "cpu", "tiled", ("one process",))


def settings(folder: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "model": {"name": "tiny-llama"},
        "data": {"files": "a"},
        "sequence_length": 8,
        "output_dir": str(folder / "out"),
        "max_steps": 3,
        "logging": {"to": []},
    }
    return parse_config({**values, **changes})


class Handle(SimpleNamespace):
    """As much of a prepared model as a record asks for."""

    def __init__(self) -> None:
        super().__init__(mesh=Mesh(), plan=PLAN, automatic=SimpleNamespace(plans={}))


def record(folder: Path, handle: Any = None, **changes: Any) -> tuple[Record, io.StringIO]:
    told, config = io.StringIO(), settings(folder, **changes)
    progress = Progress(told, config.max_steps)
    return Record(config, progress, handle or Handle(), torch.device("cpu"), "tiny-llama: small", "3 documents"), told


def test_a_run_is_written_down_before_its_first_step(tmp_path: Path) -> None:
    kept, told = record(tmp_path)
    assert not (tmp_path / "out").exists()
    with kept:
        facts = read_facts(tmp_path / "out")
        assert facts is not None and facts.end is None
        assert (facts.introduction, facts.data) == ("tiny-llama: small", "3 documents")
        assert facts.config["max_steps"] == 3 and facts.versions["torch"] and facts.machine.device == "cpu"
        assert facts.plan is not None and facts.plan.reasons == ["one process"]
        assert not (tmp_path / "out" / "report.html").exists()
    assert told.getvalue().splitlines() == ["tiny-llama: small", f"report: {tmp_path / 'out' / 'report.html'}"]


def end(folder: Path) -> tuple[str, str]:
    facts = read_facts(folder / "out")
    assert facts is not None and facts.end is not None
    assert facts.end.kind.removesuffix("ed") in (folder / "out" / "report.html").read_text()
    return facts.end.kind, facts.end.text


def test_every_end_is_told(tmp_path: Path) -> None:
    with record(tmp_path / "a")[0] as kept:
        for step in (1, 2, 3):
            kept.step(row(step))
    assert end(tmp_path / "a")[0] == "ended"
    with record(tmp_path / "b")[0] as kept:
        kept.step(row(2))
        kept.note("stopped by SIGTERM after step 2")
    assert end(tmp_path / "b") == ("stopped", "stopped by SIGTERM after step 2")
    for folder, error in (("c", TrainingError("Step 2: loss nan")), ("d", torch.OutOfMemoryError("no room"))):
        kept = record(tmp_path / folder)[0]
        with pytest.raises(type(error)), kept:
            raise error
        assert end(tmp_path / folder) == ("failed", str(error))
    kept = record(tmp_path / "e")[0]
    with pytest.raises(KeyboardInterrupt), kept:
        raise KeyboardInterrupt
    assert end(tmp_path / "e")[0] == "stopped"
    with record(tmp_path / "f")[0]:  # went on from its last step
        pass
    assert end(tmp_path / "f")[0] == "ended"


def test_the_plan_for_the_most_demanding_rows_is_kept(tmp_path: Path) -> None:
    handle = Handle()
    with record(tmp_path, handle)[0] as kept:
        for i, (tokens, size) in enumerate(((8, 100), (16, 300), (4, 50))):
            handle.automatic.plans[1, tokens, False] = Plan(
                1, 1, 1, "cpu", "tiled", seq_len=tokens, gpu_bytes={"x": size}
            )
            kept.step(row(i + 1))
            facts = read_facts(tmp_path / "out")
            assert facts is not None and facts.plan is not None
            assert facts.plan.gpu_bytes == {"x": (100, 300, 300)[i]}


def test_a_run_that_goes_on_keeps_its_name_and_its_first_start(tmp_path: Path) -> None:
    with record(tmp_path)[0]:
        before = read_facts(tmp_path / "out")
    with record(tmp_path, resume=True)[0]:
        after = read_facts(tmp_path / "out")
    assert before is not None and after is not None
    assert (after.run, after.starts[0], len(after.starts)) == (before.run, before.starts[0], 2)
    with record(tmp_path, overwrite=True)[0]:
        anew = read_facts(tmp_path / "out")
    assert anew is not None and anew.run != before.run and len(anew.starts) == 1


def test_a_broken_account_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_bytes(b"\0" * 100)
    kept, told = record(tmp_path, resume=True)
    with kept:
        kept.step(row(3))
    assert "run.json cannot be read" in told.getvalue() and "It is written anew." in told.getvalue()
    assert end(tmp_path)[0] == "ended"


def test_a_disk_that_refuses_the_account_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "out" / ".run.json.partial").mkdir(parents=True)  # stands in the way
    kept, told = record(tmp_path)
    with kept:
        kept.step(row(3))
    assert told.getvalue().count(f"Cannot write {tmp_path / 'out' / 'run.json'}") == 2
    assert "There is no report.html: " in told.getvalue() and "step 3/3" in told.getvalue()


def test_a_folder_with_nothing_but_an_account_is_empty_enough(tmp_path: Path) -> None:
    with record(tmp_path)[0]:
        pass
    check_output(tmp_path / "out", overwrite=False)
    (tmp_path / "out" / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="is not empty"):
        check_output(tmp_path / "out", overwrite=False)
    (tmp_path / "out" / "tensorboard").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    clear_output(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_what_loggers_get() -> None:
    found = scalars(row(2, exchange_s=0.5, mfu=None, grad_norm=float("inf")))
    assert found["train/loss"] == 2.5 and found["speed/exchange_share"] == 0.25
    assert found["seconds/backward_s"] == 1.0 and not {"speed/mfu", "train/grad_norm"} & set(found)


class Board:
    """Stands for the modules of wandb and of trackio."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[int, float]] = []
        self.finished = 0

    def init(self, **options: Any) -> Board:
        self.started = options
        return self

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.logged.append((step, scalars["train/loss"]))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_boards_get_every_step_under_the_runs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
) -> None:
    board = Board()
    monkeypatch.setitem(sys.modules, name, board)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(loggers, "_installed", lambda package: True)
    kept = record(tmp_path, logging={"to": name, "project": "mine"})[0]
    with kept:
        kept.step(row(1))
        kept.step(row(2))
        assert not board.finished
    facts = read_facts(tmp_path / "out")
    assert facts is not None and board.started[key] == facts.run
    assert (board.started["project"], board.started["resume"]) == ("mine", "allow")
    assert board.started["config"]["max_steps"] == 3
    assert (board.logged, board.finished) == ([(1, 2.5), (2, 2.5)], 1)


def test_tensorboard_is_the_default_and_drops_steps_that_are_taken_again(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, changes in ((1, {}), (2, {"resume": True})):
        with record(tmp_path, logging={}, **changes)[0] as kept:
            for step in range(first, 4):
                kept.step(row(step, loss=float(10 * first + step)))
    events = accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 11.0), (2, 22.0), (3, 23.0)]


def test_a_logger_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "_installed", lambda package: False)
    for name in ("tensorboard", "wandb", "trackio"):
        with pytest.raises(ConfigError, match=f"asks for {name}, which is not installed: pip install {name}"):
            check_loggers(settings(tmp_path, logging={"to": [name]}).logging)
    default = settings(tmp_path, logging={}).logging
    check_loggers(default)
    assert chosen(default)[0] == ()
    kept, told = record(tmp_path, logging={})
    with kept:
        kept.step(row(1))
        kept.step(row(2))
    assert told.getvalue().count("TensorBoard is not installed") == 1


def test_a_folder_of_that_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_logger").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not loggers._installed("some_logger")
    (tmp_path / "some_logger" / "__init__.py").write_text("")
    assert loggers._installed("some_logger")


@pytest.mark.parametrize("value", ["tensorbord", ["wandb", "mlflow"], 3])
def test_other_loggers_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"logging\.to"):
        settings(tmp_path, logging={"to": value})


def test_the_first_error_of_several_processes_is_what_the_page_says(tmp_path: Path) -> None:
    """The first process may only know that another has gone; what an earlier run left is not touched."""
    config = settings(tmp_path)
    with pytest.raises(TrainingError), launch._told(config):
        raise TrainingError("before anything was written")
    assert not (tmp_path / "out").exists()

    def fails() -> None:
        try:
            with record(tmp_path)[0]:
                raise RuntimeError("Connection closed by peer")
        except RuntimeError:
            assert end(tmp_path) == ("failed", "Connection closed by peer")
            raise TrainingError("Step 2: loss nan") from None

    with pytest.raises(TrainingError), launch._told(config):
        fails()
    assert end(tmp_path) == ("failed", "Step 2: loss nan")
    with pytest.raises(TrainingError), launch._told(config):
        raise TrainingError("of a later run, before it began")
    assert end(tmp_path) == ("failed", "Step 2: loss nan")


def test_a_logger_that_fails_takes_nothing_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot start, one that breaks, and one that cannot end: the page is written, and each is told of."""

    class Broken(Board):
        def init(self, **options: Any) -> Board:
            raise ConnectionError("no login")

        def log(self, scalars: Mapping[str, float], step: int) -> None:
            raise TimeoutError("no answer")

    class Late(Broken):
        def init(self, **options: Any) -> Board:
            return self

    monkeypatch.setattr(loggers, "_installed", lambda package: True)
    for board, said in ((Broken(), "no login"), (Late(), "no answer")):
        monkeypatch.setitem(sys.modules, "wandb", board)  # pyright: ignore[reportArgumentType]
        kept, told = record(tmp_path / type(board).__name__, logging={"to": "wandb"})
        with kept:
            kept.step(row(1))
            kept.step(row(2))
        assert told.getvalue().count(said) == 1
        assert (tmp_path / type(board).__name__ / "out" / "report.html").exists()

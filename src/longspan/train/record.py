"""Keep the record of a run beside its metrics: run.json as it starts, report.html as it ends."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from longspan.config import RunConfig
from longspan.errors import ConfigError, TrainingError
from longspan.plan.plan import Plan
from longspan.report import Facts, PlanFacts, conclude, end_of, read_facts, write_facts
from longspan.report.place import place
from longspan.train.loggers import About, Logger, chosen, open_logger, scalars
from longspan.train.metrics import Row
from longspan.train.progress import Progress
from longspan.versions import versions


class Record:
    """Shows a run as `Progress` does, sends it to loggers, and writes down what is needed to tell of it afterwards.

    Args:
        handle: what `longspan.prepare` returned; its plan is known once a length has been seen.
        introduction: what the run is, in a line.
        data: what became of the documents, in a line.
        run: its name, unless it goes on under the one that it had; None draws one.
    """

    def __init__(
        self,
        config: RunConfig,
        progress: Progress,
        handle: Any,
        device: torch.device,
        introduction: str,
        data: str,
        run: str | None = None,
    ) -> None:
        self._config, self._progress, self._handle = config, progress, handle
        self._folder = Path(config.output_dir)
        before = self._before() if config.resume else None
        self._names, remark = chosen(config.logging)
        self._loggers: list[Logger] = []
        self._plans = 0
        self._last: Row | None = None
        self._told = ""
        self._facts = Facts(
            run=(run or secrets.token_hex(4)) if before is None else before.run,
            starts=[*(() if before is None else before.starts), datetime.now(UTC).isoformat(timespec="seconds")],
            introduction=introduction,
            data=data,
            config=config.model_dump(mode="json"),
            versions=versions(),
            machine=place(device, handle.mesh.world.size),
            plan=PlanFacts.model_validate(handle.plan.to_json()),
        )
        self.note(introduction)
        if remark is not None:
            self.note(remark)

    def __enter__(self) -> Self:
        self._write()
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.__exit__(kind, error, tb)
        stopped = error is None and self._last is not None and self._last.step < self._config.max_steps
        end = end_of(error, self._told if stopped else None)  # before a logger that fails is told of
        self._to_loggers(lambda logger: logger.close())
        self.note(conclude(self._folder, self._facts, end))

    def note(self, text: str) -> None:
        """Write a line that stays."""
        self._told = text
        self._progress.note(text)

    def step(self, row: Row) -> None:
        """Show and log a step."""
        self._last = row
        self._progress.step(row)
        if self._names:
            facts = self._facts
            about = About(self._folder, facts.run, row.step, self._config.logging.project, facts.config)
            self._loggers = [logger for name in self._names for logger in self._opened(name, about)]
            self._names = ()
        self._to_loggers(lambda logger: logger.log(row.step, scalars(row)))
        self._note_plan()

    def _opened(self, name: str, about: About) -> list[Logger]:
        """Open a logger; one that cannot be is told of, and takes nothing from the run."""
        try:
            return [open_logger(name, about)]
        except Exception as error:  # theirs are of any kind: no login, no network, a full disk
            self._leave_out(name, error)
            return []

    def _to_loggers(self, work: Callable[[Logger], None]) -> None:
        """Do something with each logger; one that fails is told of, and left out from then on."""
        for logger in list(self._loggers):
            try:
                work(logger)
            except Exception as error:
                self._loggers.remove(logger)
                self._leave_out(type(logger).__name__, error)

    def _leave_out(self, logger: str, error: Exception) -> None:
        self.note(f"logging.to: {logger} is left out from now on: {type(error).__name__}: {str(error)[:300]}")

    def _before(self) -> Facts | None:
        """Return what an earlier start has left; a file that cannot be read must not keep a run from going on."""
        try:
            return read_facts(self._folder)
        except ConfigError as error:
            self._progress.note(f"{error} It is written anew.")
            return None

    def _note_plan(self) -> None:
        """Write down the plan for the most demanding rows so far, where there is a new one."""
        automatic = self._handle.automatic
        plans: Mapping[Any, Plan] = {} if automatic is None else automatic.plans
        if len(plans) == self._plans:
            return
        self._plans = len(plans)
        most = max(plans.values(), key=lambda plan: (sum(plan.gpu_bytes.values()), plan.seq_len or 0))
        self._facts.plan = PlanFacts.model_validate(most.to_json())
        self._write()

    def _write(self) -> None:
        """Write down what is known; a disk that refuses is told of, and takes nothing from the run."""
        try:
            write_facts(self._folder, self._facts)
        except TrainingError as error:
            self.note(str(error))

"""Save a run as it goes, and go on from what was saved."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from longspan.config import RunConfig
from longspan.errors import ConfigError
from longspan.train.checkpoint import CHECKPOINTS, METRICS
from longspan.train.checkpoints import Checkpoints
from longspan.train.data import Corpus
from longspan.train.metrics import MetricsFile
from longspan.train.record import Record
from longspan.train.resume import check_identity, identity
from longspan.train.state import read_state, write_state
from longspan.train.trainee import Trainee


class Saver:
    """Writes a run's checkpoints, and goes on from the last.

    Args:
        rows: of the data, that the steps before have taken.
        skipped: steps in a row, up to now, that were not finite.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, trainee: Trainee) -> None:
        output_dir = Path(config.output_dir)
        self._checkpoints = Checkpoints(output_dir / CHECKPOINTS, config.save.keep, (output_dir / METRICS,))
        self._trainee, self._max_steps, self._background = trainee, config.max_steps, config.save.asynchronous
        self._identity = lru_cache(
            lambda: identity(config, corpus, trainee.engine.name, trainee.mesh.world.size)
        )  # reads all tokens, so only where it is needed
        self.rows = self.skipped = 0

    def begin(self, step: int) -> None:
        """Begin to write a checkpoint, which counts once it is settled; the one before is settled first. Collective."""
        trainee = self._trainee
        about = {"rows": self.rows, "skipped": self.skipped, "identity": self._identity()}
        self._checkpoints.begin(
            step,
            about,
            lambda folder, agree: write_state(
                folder,
                trainee.model,
                trainee.engine,
                trainee.stepping,
                trainee.device,
                agree,
                background=self._background,
            ),
        )

    @property
    def busy(self) -> bool:
        """Whether this process is still writing."""
        return self._checkpoints.busy

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and make it count. Collective.

        Raises:
            TrainingError: some process could not write it.
        """
        self._checkpoints.settle()

    def resume(self, file: MetricsFile, record: Record | None) -> int:
        """Go on from the last checkpoint that is whole, if there is one; return its step, else 0. Collective.

        Raises:
            ConfigError: it is another run's, or past `max_steps`.
            TrainingError: it cannot be read.
        """
        tell = (lambda text: None) if record is None else record.note
        saved = self._checkpoints.latest(tell)
        if saved is None:
            tell("there is no checkpoint to go on from: beginning")
            return 0
        if saved.step > self._max_steps:
            raise ConfigError(
                f"max_steps is {self._max_steps:,}, but checkpoint {saved.folder} was written after step "
                f"{saved.step:,}: set max_steps to that or more, or begin anew in another output_dir."
            )
        check_identity(saved, self._identity())
        trainee = self._trainee
        read_state(saved.folder, trainee.model, trainee.engine, trainee.stepping, trainee.device)
        self.rows, self.skipped = int(saved.about["rows"]), int(saved.about.get("skipped", 0))
        if record is not None:
            file.go_on(saved.step)
        tell(f"going on after step {saved.step}")
        return saved.step

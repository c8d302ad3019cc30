"""Write report.html: as a run ends, or afterwards for one that could not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from longspan.errors import ConfigError, LongspanError
from longspan.report.facts import METRICS, REPORT, RUN, End, Facts, read_facts, write_facts, write_whole
from longspan.report.page import page
from longspan.report.story import Story


def write_report(folder: Path) -> tuple[Path, str]:
    """Make the page of a run from what it left; return where it is, and the run's verdict in a line.

    Raises:
        ConfigError: the folder is not a run's.
        TrainingError: the page cannot be written.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the output_dir of a run.")
    if not any((folder / name).is_file() for name in (RUN, METRICS)):
        raise ConfigError(f"{folder} holds neither {RUN} nor {METRICS}: name the output_dir of a run.")
    story = Story.read(folder, read_facts(folder))
    write_whole(folder / REPORT, page(story))
    return folder / REPORT, story.verdict


def conclude(folder: Path, facts: Facts, end: End) -> str:
    """Note how a run ended and write its page; return what to tell the user.

    A page that cannot be written, as the disk may be full, does not take anything from the run: what is told says so.
    """
    facts.end = end
    try:
        write_facts(folder, facts)
        path, _ = write_report(folder)
    except LongspanError as error:
        return f"There is no {REPORT}: {error}"
    return f"report: {path}"


def end_of(error: BaseException | None, stopped: str | None) -> End:
    """Say how a run ended.

    Args:
        error: what it could not go on for, if anything.
        stopped: why it stopped before its last step, if it did.
    """
    time = datetime.now(UTC).isoformat(timespec="seconds")
    if isinstance(error, KeyboardInterrupt):
        return End(kind="stopped", text="stopped from the keyboard", time=time)
    if error is not None:
        return End(kind="failed", text=str(error) or type(error).__name__, time=time)
    return End(kind="ended" if stopped is None else "stopped", text=stopped or "all steps were taken", time=time)

"""Say in a user's terms what torch raises in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from longspan.errors import LongspanError, TrainingError
from longspan.train.pulse import Pulse

_LOST = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "socket", "timed out")
_NO_ROOM = ("can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory")


@contextmanager
def explained(pulse: Pulse, advice: Callable[[], str]) -> Iterator[None]:
    """Turn a lack of memory, the loss of another process, and what a disk refuses, into an error that says what to do.

    Args:
        advice: what to do about a lack of memory.

    Raises:
        TrainingError: in place of what torch raised.
    """
    try:
        yield
    except LongspanError:
        raise
    except OSError as error:
        raise TrainingError(
            f"In {pulse.now}: {error}. Checkpoints are as they were; once that is mended, go on with --resume."
        ) from error
    except (RuntimeError, MemoryError) as error:
        where = f"In {pulse.now}"
        said = (str(error).splitlines() or [type(error).__name__])[0][:300]
        if is_shortage(error):
            raise TrainingError(f"{where}: out of memory. {advice()}\n  torch says: {said}") from error
        if is_loss(error):
            raise TrainingError(
                f"{where}: another process is gone, or cannot be reached ({said}). Its own message, or its host's log, "
                "says why; a process that was killed without one often took too much host memory. Go on from the last "
                "checkpoint with --resume, or let torchrun --max-restarts do it."
            ) from error
        raise


def is_shortage(error: Exception) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(text in str(error).lower() for text in _NO_ROOM)


def is_loss(error: Exception) -> bool:
    """Whether a collective failed because of another process."""
    if isinstance(error, dist.DistError):
        return True
    return dist.is_initialized() and any(text in str(error).lower() for text in _LOST)

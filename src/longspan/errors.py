"""Errors a user can act on: each message says what is wrong, with which numbers, and the way out."""


class LongspanError(Exception):
    """Base of every error that longspan raises on purpose."""


class ConfigError(LongspanError, ValueError):
    """A setting that cannot be used."""


class BatchError(LongspanError, ValueError):
    """A batch that cannot be sharded, or that does not fit the prepared model."""


class ModelError(LongspanError, ValueError):
    """A model, or a layer of it, that longspan does not understand well enough to be exact."""


class TopologyError(LongspanError, ValueError):
    """Parallel degrees that the processes or the heads cannot serve."""


class KernelError(LongspanError, ValueError):
    """An attention kernel that is missing or cannot do what the model asks for."""


class DataError(LongspanError, ValueError):
    """Training data that cannot be read as it was declared."""


class TrainingError(LongspanError, RuntimeError):
    """A run that had to stop."""

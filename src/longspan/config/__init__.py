"""The settings of a run: their schema, and how they are read from a file and the command line."""

from longspan.config.load import load_config, parse_config
from longspan.config.schema import (
    DataConfig,
    LoggingConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SaveConfig,
    ScheduleConfig,
    parse_size,
)
from longspan.config.settings import Setting, settings

__all__ = [
    "DataConfig",
    "LoggingConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "SaveConfig",
    "ScheduleConfig",
    "Setting",
    "load_config",
    "parse_config",
    "parse_size",
    "settings",
]

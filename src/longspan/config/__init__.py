"""The settings of a run: their schema, and how they are read from a file and the command line."""

from longspan.config.data import DataConfig, InspectConfig
from longspan.config.faults import FaultsConfig
from longspan.config.load import expand_placeholders, load_config, load_inspect_config, parse_config
from longspan.config.logging import LoggingConfig
from longspan.config.memory import MemoryConfig
from longspan.config.model import AdapterConfig, ModelConfig, RopeConfig
from longspan.config.schema import (
    OptimizerConfig,
    RunConfig,
    SaveConfig,
    ScheduleConfig,
)
from longspan.config.section import parse_size
from longspan.config.settings import Setting, settings

__all__ = [
    "AdapterConfig",
    "DataConfig",
    "FaultsConfig",
    "InspectConfig",
    "LoggingConfig",
    "MemoryConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RopeConfig",
    "RunConfig",
    "SaveConfig",
    "ScheduleConfig",
    "Setting",
    "expand_placeholders",
    "load_config",
    "load_inspect_config",
    "parse_config",
    "parse_size",
    "settings",
]

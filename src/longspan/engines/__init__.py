"""Who holds the parameters and reduces the gradients of a prepared model."""

from longspan.engines.ddp import DataParallel
from longspan.engines.fsdp import FullyShardedDataParallel
from longspan.engines.mpu import MPU
from longspan.engines.origin import Origin
from longspan.engines.protocol import Engine, Prepared, StepsItself
from longspan.engines.select import build_engine
from longspan.engines.single import Single
from longspan.engines.zero import Zero

__all__ = [
    "MPU",
    "DataParallel",
    "Engine",
    "FullyShardedDataParallel",
    "Origin",
    "Prepared",
    "Single",
    "StepsItself",
    "Zero",
    "build_engine",
]

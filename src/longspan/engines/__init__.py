"""Who holds the parameters and reduces the gradients of a prepared model."""

from longspan.engines.ddp import DataParallel
from longspan.engines.fsdp import FullyShardedDataParallel
from longspan.engines.protocol import Engine, Prepared
from longspan.engines.select import build_engine
from longspan.engines.single import Single

__all__ = ["DataParallel", "Engine", "FullyShardedDataParallel", "Prepared", "Single", "build_engine"]

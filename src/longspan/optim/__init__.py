"""AdamW for long-context fine-tuning: what its states cost, where they are, and when a step is taken."""

from longspan.optim.build import KINDS, build_optimizer, check_kind, set_learning_rate
from longspan.optim.host import HostAdamW, host_bytes
from longspan.optim.stepping import StepAfterBackward, StepInBackward, Stepping, choose_stepping

__all__ = [
    "KINDS",
    "HostAdamW",
    "StepAfterBackward",
    "StepInBackward",
    "Stepping",
    "build_optimizer",
    "check_kind",
    "choose_stepping",
    "host_bytes",
    "set_learning_rate",
]

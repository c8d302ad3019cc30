"""DeepSpeed's ALST by its own names: what scripts import from `ulysses_sp` and for offloading, made of longspan.

DeepSpeed is needed by those who train with its engine alone.
"""

from longspan.integrations.deepspeed import groups
from longspan.integrations.deepspeed.attention import UlyssesSPAttentionHF
from longspan.integrations.deepspeed.data import UlyssesSPDataLoaderAdapter
from longspan.integrations.deepspeed.offloading import get_checkpoint_hidden_states_offloading_ctx_manager
from longspan.integrations.deepspeed.tiled import (
    AutogradComputeMLP,
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledLoss,
    TiledMLP,
    UlyssesSPFwdLossBwdWithLogits,
    sequence_tiled_compute,
)

__all__ = [
    "AutogradComputeMLP",
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "UlyssesSPFwdLossBwdWithLogits",
    "get_checkpoint_hidden_states_offloading_ctx_manager",
    "groups",
    "sequence_tiled_compute",
]

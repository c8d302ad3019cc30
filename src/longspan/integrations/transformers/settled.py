"""What processes settle each for themselves before they make groups, and must settle alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from longspan.agreement import decide_together
from longspan.attention.call import Kind
from longspan.errors import TopologyError
from longspan.integrations.transformers.probe import Probed
from longspan.keep import Memory
from longspan.kernels.protocol import Kernel
from longspan.plan.degrees import Degrees
from longspan.plan.exchange import ExchangeRule
from longspan.plan.plan import Plan


@dataclass(frozen=True)
class Settled:
    """How a model will be run, as one process sees it from its own copy, device and libraries."""

    ways: Memory
    probed: Probed
    degrees: Degrees
    kernels: Mapping[Kind, Kernel]
    exchange: ExchangeRule
    plan: Plan

    def told(self) -> dict[str, str]:
        """Return what collectives of later steps depend on, by name."""
        return {
            "layers": f"{len(self.probed.shapes)} with {self.probed.shapes}",
            "degrees": f"ulysses {self.degrees.ulysses} x ring {self.degrees.ring}",
            "kernels": " + ".join(dict.fromkeys(kernel.name for kernel in self.kernels.values())),
            "kv_exchange": self.exchange.refusal or self.exchange.asked,
            "memory": str(self.ways),
        }


def settle_together(settle: Callable[[], Settled], ranks: int) -> Settled:
    """Settle on each process, and go on only if all came to the same. Collective over the default group.

    Args:
        settle: holds no collective.
        ranks: processes of the mesh; one process alone asks nobody.

    Raises:
        Exception: this process's own.
        TopologyError: another process raised, or settled otherwise: which, and what.

    Cost: an all-gather of objects.
    """
    if ranks == 1:
        return settle()
    own = dist.get_rank()
    settled, everyone = decide_together(settle, Settled.told, f"prepare the model, so process {own} does not")
    for name in everyone[own]:
        found = [told[name] for told in everyone]
        other = next((rank for rank, value in enumerate(found) if value != found[0]), None)
        if other is not None:
            raise TopologyError(
                f"Processes differ in {name}: process 0 has {found[0][:300]}; process {other} has "
                f"{found[other][:300]}. Prepare the same model with the same settings everywhere, with the same "
                "packages on each host; degrees and kernel can be named."
            )
    return settled

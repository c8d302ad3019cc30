"""No engine: whole parameters on every process, gradients reduced by longspan itself after backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from longspan.engines.origin import Origin
from longspan.engines.protocol import GradReduction, OwnBackward, Prepared, clip_by_global_norm


class Single(OwnBackward):
    """Train one process, or a few that keep whole parameters and reduce once per step."""

    name = "single"
    grad_reduction: GradReduction = "mean"

    def wrap(self, model: nn.Module, prepared: Prepared, origin: Origin | None = None) -> nn.Module:
        """Return the model as it is, with its weights."""
        if origin is not None:
            origin.bring(model)
        self._model, self._prepared = model, prepared
        return model

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Do nothing: gradients stay local until `reduce`."""
        return nullcontext()

    def reduce(self) -> None:
        """Reduce the accumulated gradients over the world. Cost: one all-reduce of every gradient."""
        if self._prepared.mesh.world.size > 1:
            self._prepared.reduce_gradients()

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Clip by the global norm."""
        return clip_by_global_norm(self._model.parameters(), max_norm)

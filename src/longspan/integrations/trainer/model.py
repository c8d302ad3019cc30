"""The model as a Trainer sees it: it takes full batches, as one process would, and works on this rank's part."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.batch import CONTEXT, IGNORE_INDEX
from longspan.integrations.transformers.applied import Applied
from longspan.integrations.transformers.forward import OUTPUT


class FullBatch:
    """Stands in for the `forward` of a prepared model: full batch in, what a data-parallel process returns out.

    The ranks that share a sequence return the same. A loss that is divided by `num_items_in_batch` is the share of a
    data rank, to be multiplied by the number of data ranks, as Trainer does.

    Args:
        token_fields: further tensors [B, S, ...] of batches.
    """

    def __init__(self, handle: Applied, token_fields: Sequence[str]) -> None:
        self.handle, self.token_fields = handle, tuple(token_fields)
        self.original: Any = handle.model.forward
        functools.update_wrapper(self, self.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handle = self.handle
        if args:
            kwargs |= inspect.signature(self.original).bind_partial(*args).arguments
        runs_plain = not handle.model.training and not handle.sequence_parallel_in_eval
        if handle.bypassed or runs_plain or CONTEXT in kwargs:
            return self.original(**kwargs)
        items, fused = kwargs.pop("num_items_in_batch", None), kwargs.pop("fused_lm_head", False)
        batch = {name: value for name, value in kwargs.items() if value is not None}
        fields = [name for name in self.token_fields if name in batch]
        part = handle.shard(batch, None if items is None else _whole(items), fields)
        if fused:
            return self._scores(part, items, "shift_labels" in batch)
        out = self.original(**part)
        if out.get("loss") is not None:
            out["loss"] = self._share(out["loss"], items)
        if out.get("logits") is not None:
            out["logits"] = handle.gather(out["logits"], part)
        if out.get("router_logits") is not None:  # [B * S, E] of each layer
            out["router_logits"] = tuple(handle.gather(each, part).flatten(0, 1) for each in out["router_logits"])
        return out

    def _share(self, loss: Tensor, items: Any) -> Tensor:
        """Return a data rank's share of the loss; in evaluation nan where there is nothing to predict."""
        if items is None:
            return loss
        if not self.handle.model.training:
            loss = loss.masked_fill(torch.as_tensor(items, device=loss.device) == 0, float("nan"))
        return loss / self.handle.mesh.data.size

    def _scores(self, part: dict[str, Any], items: Any, shifted: bool) -> Any:
        """Return what TRL's fused head returns, for the full batch."""
        from trl.trainer.utils import FusedCausalLMOutput

        handle = self.handle
        out = self.original(**part, **{OUTPUT: "scores"})
        targets = (part["shift_labels"] != IGNORE_INDEX).to(out.logits)[..., None]
        full = handle.gather(torch.cat([out.logits, targets], dim=-1), part)  # [B, S, 4]
        log_probs, entropy, hits, mask = (full if shifted else full[:, :-1]).unbind(-1)
        mask = mask.detach() > 0.5
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
        auxiliary = out.get("aux_loss")
        if auxiliary is not None:
            coefficient = getattr(handle.model.config.get_text_config(), "router_aux_loss_coef", 0.0)
            loss = loss + coefficient * auxiliary
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=log_probs,
            entropy=entropy.detach(),
            is_top1=hits.detach() > 0.5,
            label_mask=mask,
            aux_loss=auxiliary,
        )


def _whole(items: Any) -> int | Tensor:
    """Return a number of targets as a whole number; Trainer divides it, which makes it a float."""
    if not isinstance(items, Tensor):
        return round(items)
    return items.round().long().reshape(()) if items.is_floating_point() else items.reshape(())

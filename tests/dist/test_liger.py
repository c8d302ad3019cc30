"""Models whose forward Liger has replaced: its fused loss stands aside, and one tiled loss runs."""

from __future__ import annotations

import types
from typing import Any
from unittest.mock import patch

import pytest
import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

import longspan
from dense import apart
from longspan.check.float64 import float64_throughout
from longspan.integrations.transformers import forward
from longspan.keep import Keep, Memory
from models import build, one_device
from pool import RunRanks
from test_parity import PACKED, RAGGED, Errors, compare, exact, worst

pytestmark = pytest.mark.dist


def fused_forward(self: Any, input_ids: Any = None, labels: Any = None, logits_to_keep: int = 0, **kwargs: Any) -> Any:
    """A model's forward as Liger writes it: in training, hidden states and the head's weight go into one fused loss."""
    outputs = self.model(input_ids=input_ids, **kwargs)
    hidden, shift_labels, loss, logits = outputs.last_hidden_state, kwargs.pop("shift_labels", None), None, None
    if self.training and (labels is not None or shift_labels is not None):
        self.fused += 1
        targets = shift_labels if labels is None else F.pad(labels[:, 1:], (0, 1), value=-100)
        loss = F.cross_entropy((hidden @ self.lm_head.weight.T).flatten(0, 1), targets.flatten())
    else:
        logits = self.lm_head(hidden[:, slice(-logits_to_keep, None) if logits_to_keep else slice(None)])
    return CausalLMOutputWithPast(loss=loss, logits=logits)  # type: ignore[arg-type]


fused_forward.__module__ = "liger_kernel.transformers.model.llama"


def trained(memory: Memory, on_class: bool) -> list[Errors]:
    """Train on two batches; the model is patched as a whole class is, or by itself."""
    found = []
    with float64_throughout():
        model: Any = build("llama")
        truths = [one_device(model, [rows]) for rows in (PACKED, RAGGED)]
        if on_class:
            model.__class__ = type("LlamaForCausalLM", (type(model),), {"forward": fused_forward})
        else:
            model.forward = types.MethodType(fused_forward, model)
        model.fused = 0
        handle = longspan.prepare(model, 2, ulysses_degree=1, memory=memory)
        assert "loss tiled cross-entropy" in handle.plan.summary()
        assert any("Liger's fused loss" in reason and "is not used" in reason for reason in handle.plan.reasons)
        for rows, (loss, gradients, _) in zip((PACKED, RAGGED), truths, strict=True):
            model.zero_grad()
            with patch.object(forward, "tiled_loss", wraps=forward.tiled_loss) as tiled:
                out = model(**handle.shard(rows.batch()))
            out.loss.backward()
            handle.reduce_gradients()
            assert tiled.call_count == 1 and model.fused == 0
            found.append(compare(model, gradients) | {"loss": apart(float(out.loss), loss)})
        with handle.bypass():
            plain = model(**{name: field for name, field in PACKED.batch().items() if name != "position_ids"})
            assert model.fused == 1 and plain.logits is None, "the plain model is Liger's"
        handle.remove()
        assert model.forward.__func__ is fused_forward
    return found


@pytest.mark.parametrize("memory", [Memory(), Memory(4, Keep.X_O)], ids=["whole", "tiles"])
@pytest.mark.parametrize("on_class", [False, True])
def test_one_loss_runs_and_is_exact(run_ranks: RunRanks, memory: Memory, on_class: bool) -> None:
    for results in run_ranks(2, trained, memory, on_class):
        assert exact(results), worst(results)


def test_the_pick_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plain: Any = build("llama")
    assert not any("Liger" in reason for reason in longspan.prepare(plain).plan.reasons)
    model: Any = build("llama")
    model.forward = types.MethodType(fused_forward, model)
    capsys.readouterr()
    longspan.prepare(model)
    told = capsys.readouterr().err
    assert "loss tiled cross-entropy" in told and "Liger's fused loss in LlamaForCausalLM.forward is not used" in told

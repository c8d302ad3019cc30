"""A script written for DeepSpeed's ALST trains as one process does, at every ZeRO stage."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.dist
deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import alst_style  # noqa: E402

REL = 2e-5  # float32, and a loss that transformers computes in float32


def truth() -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of each step of one process with the plain model."""
    torch.manual_seed(7)
    config = alst_style.toy_config()
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = []
    for row in alst_style.toy_data():
        optimizer.zero_grad()
        loss = model(**alst_style.collate([row]), use_cache=False).loss
        loss.backward()
        steps.append((loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        optimizer.step()
    return steps


def train(stage: int) -> tuple[int, list[tuple[float, dict[str, Tensor], bool, bool]]]:
    from deepspeed.utils import safe_get_full_grad

    from longspan.integrations.deepspeed import UlyssesSPAttentionHF

    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.comm.comm.cdb = None  # the processes of the pool join other groups from case to case
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    seen = []

    def note(step: int, engine: Any, batch: Any, outputs: Any, loss: Tensor) -> None:
        gradients = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
        shaped = outputs.logits.shape == (*batch["input_ids"].shape, 53)
        seen.append((loss.item(), gradients, "labels" in batch, shaped))

    try:
        return alst_style.main(stage, note), seen
    finally:
        UlyssesSPAttentionHF.unregister()
        deepspeed.utils.groups.mpu = None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_script_trains_as_one_process(run_ranks: Any, stage: int) -> None:
    expected = truth()
    for steps, seen in run_ranks(2, train, stage, timeout_s=120):
        assert steps == len(alst_style.LENGTHS) == len(seen)
        for (loss, gradients, labels, logits), (true_loss, true_gradients) in zip(seen, expected, strict=True):
            assert not labels and logits
            assert loss == pytest.approx(true_loss, rel=REL)
            assert gradients.keys() == true_gradients.keys()
            for name, value in true_gradients.items():
                error = (gradients[name] - value).norm() / value.norm()
                assert error <= REL, (name, float(error))

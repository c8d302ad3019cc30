"""A script written for DeepSpeed's ALST trains as one process does, at every ZeRO stage."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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


def launch() -> None:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    deepspeed.comm.comm.cdb = None  # the processes of the pool join other groups from case to case
    deepspeed.utils.groups._WORLD_GROUP = None
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)


def train(stage: int) -> tuple[int, list[tuple[float, dict[str, Tensor], bool, bool]]]:
    from deepspeed.utils import safe_get_full_grad

    full_gradient: Any = safe_get_full_grad

    from longspan.integrations.deepspeed import UlyssesSPAttentionHF

    launch()
    seen = []

    def note(step: int, engine: Any, batch: Any, outputs: Any, loss: Tensor) -> None:
        gradients = {name: torch.clone(full_gradient(p)) for name, p in engine.module.named_parameters()}
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


def tiled_mlp_forward(self: Any, x: Tensor) -> Tensor:
    """What scripts put in the place of an MLP's forward, each rank with tiles of its own number."""
    from longspan.integrations.deepspeed import TiledMLP

    def mlp_forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    shards = 3 if dist.is_initialized() and dist.get_rank() else 5
    return TiledMLP.apply(mlp_forward, self, x, shards, [self.down_proj.weight])


def with_tiles(stage: int, own_params: bool) -> dict[str, Tensor]:
    """One step on rows of unlike lengths per rank, data parallel, in tiles of unlike numbers."""
    from deepspeed.utils import safe_get_full_grad

    full_gradient: Any = safe_get_full_grad
    from transformers.models.llama import modeling_llama

    from longspan.integrations.deepspeed import TiledFusedLogitsLoss

    launch()
    original = modeling_llama.LlamaMLP.forward
    modeling_llama.LlamaMLP.forward = tiled_mlp_forward
    try:
        torch.manual_seed(7)
        model: Any = AutoModelForCausalLM.from_config(
            alst_style.toy_config(), attn_implementation="sdpa", dtype=torch.float32
        )
        model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
            config=alst_style.deepspeed_config(stage),
            dist_init_required=False,
        )
        gradients = {}
        for _ in range(2):  # stage 3 learns the order of modules in the first step
            row = alst_style.collate([alst_style.toy_data()[dist.get_rank()]])
            ids, positions = row["input_ids"], row["position_ids"]
            hidden = engine.module.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            head = engine.module.lm_head
            targets = F.pad(row["labels"][:, 1:], (0, 1), value=-100)
            loss = TiledFusedLogitsLoss.apply(
                summed, head, hidden, targets, None, 4, [head.weight] if own_params else None, "sum"
            )
            engine.backward(loss / 16)
            gradients = {
                n: torch.clone(full_gradient(p)) for n, p in engine.module.named_parameters() if p.requires_grad
            }
            engine.step()
        return gradients
    finally:
        modeling_llama.LlamaMLP.forward = original


def summed(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self(x).float(), y, reduction="sum")


@pytest.mark.parametrize(("stage", "own_params"), [(0, True), (1, True), (2, True), (3, True), (3, False)])
def test_tiles_of_unlike_numbers_at_every_stage(run_ranks: Any, stage: int, own_params: bool) -> None:
    torch.manual_seed(7)
    config = alst_style.toy_config()
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for row in alst_style.toy_data()[:2]:
        logits = model(**alst_style.collate([row]), use_cache=False).logits
        targets = F.pad(row["labels"][1:], (0, 1), value=-100)
        (F.cross_entropy(logits[0], targets, reduction="sum") / 16 / 2).backward()
    for gradients in run_ranks(2, with_tiles, stage, own_params, timeout_s=120):
        for name, value in gradients.items():
            expected = model.get_parameter(name).grad
            assert (value - expected).norm() <= REL * expected.norm(), name

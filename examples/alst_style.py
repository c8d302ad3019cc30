"""Train a toy model in the way of DeepSpeed's ALST: rows divided over ranks, the loss made by hand.

torchrun --nproc-per-node 2 examples/alst_style.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig

from longspan.integrations.deepspeed import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

LENGTHS = (24, 17, 30, 24)


def toy_config() -> LlamaConfig:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 53, "head_dim": 8}
    return LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)


def toy_data() -> list[dict[str, torch.Tensor]]:
    """Rows of unlike lengths; in the third the first half has no target."""
    rows = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(53, (length,), generator=torch.Generator().manual_seed(number))
        labels = ids.clone()
        labels[: (3, 0, 20, 1)[number]] = -100
        rows.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)})
    return rows


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 100_000,  # DeepSpeed's own choice takes gibibytes, whatever the model
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def main(stage: int = 3, seen: Callable[[int, Any, Any, Any, Any], None] = lambda *_: None) -> int:
    """Train for one epoch; `seen` is shown each step before the optimizer's."""
    sequence_parallel_size = dist.get_world_size()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=toy_config(),
        core_attn_implementation="sdpa",
        sequence_parallel_size=sequence_parallel_size,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(toy_config(), attn_implementation="sdpa", dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config=deepspeed_config(stage),
        mpu=mpu,
        dist_init_required=False,
    )

    data = toy_data()
    loader = DataLoader(data, batch_size=1, collate_fn=collate, sampler=DistributedSampler(data, shuffle=False))
    sp_group = groups._get_sequence_parallel_group()
    sp_world_size = groups._get_sequence_parallel_world_size()
    sp_rank = groups._get_sequence_parallel_rank()
    loader = UlyssesSPDataLoaderAdapter(
        loader, sp_rank=sp_rank, sp_group=sp_group, sp_world_size=sp_world_size, device=engine.device
    )

    step = 0
    for step, batch in enumerate(loader, 1):
        batch = {name: field.to(engine.device) for name, field in batch.items()}
        outputs = engine(**batch)
        loss = engine.module.loss_function(
            logits=outputs.logits,
            labels=None,
            shift_labels=batch["shift_labels"],
            vocab_size=engine.module.config.vocab_size,
        )
        losses = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
        good_tokens = (batch["shift_labels"] != -100).sum()
        all_good_tokens = torch.distributed.nn.functional.all_gather(good_tokens, group=sp_group)
        total = sum(one * tokens for one, tokens in zip(losses, all_good_tokens, strict=True))
        loss = total / max(sum(all_good_tokens), 1)
        engine.backward(loss)
        seen(step, engine, batch, outputs, loss)
        engine.step()
    return step


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # kernels and collectives run on the current device
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    print(f"rank {dist.get_rank()}: {main()} steps")

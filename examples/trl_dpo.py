"""Direct preference optimization on long sequences: log-probabilities without logits, over divided sequences.

    torchrun --nproc-per-node 2 examples/trl_dpo.py

The batches are TRL's (DataCollatorForPreference); `handle.token_logps` stands in for the logits that a preference loss
is usually computed from. The same lines serve GRPO and distillation: ask for `entropy=True` where it is needed, and
leave `gather=True` out where a sum over this rank's tokens is enough. Policy and reference are prepared side by side.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference

import longspan


def build(name: str | None) -> Any:
    """Return a model; without a name a tiny one with random weights."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def preferences(count: int) -> list[dict[str, list[int]]]:
    """Return prompts, each with an answer that was chosen and one that was not; random tokens."""
    draw = torch.Generator().manual_seed(0)

    def some(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most, (1,), generator=draw))
        return torch.randint(1, 64, (length,), generator=draw).tolist()

    return [{"prompt_ids": some(20, 40), "chosen_ids": some(5, 20), "rejected_ids": some(5, 20)} for _ in range(count)]


def answers(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn TRL's batch into one with labels: the tokens of the answers."""
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


def ratios(handle: Any, batch: dict[str, Tensor], model: Any = None) -> Tensor:
    """Return by how much more likely each chosen answer is than the rejected one, in nats, [pairs]."""
    logps = handle.token_logps(handle.shard(batch), gather=True, model=model)  # [2 x pairs, S] on every rank
    chosen, rejected = logps.sum(1).chunk(2)
    return chosen - rejected


def main() -> None:
    """Train a few steps and print the losses."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--beta", type=float, default=0.1)
    asked = options.parse_args()
    ranks, on_gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # kernels and collectives run on the current device
    if ranks > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    policy, reference = build(asked.model).to(device), build(asked.model).to(device).eval().requires_grad_(False)
    handle, behind = (longspan.prepare(model, sequence_parallel_size=ranks) for model in (policy, reference))
    wrapped = DistributedDataParallel(policy) if ranks > 1 else policy
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    collate, pairs, losses = DataCollatorForPreference(pad_token_id=0), preferences(2 * asked.steps), []
    for step in range(asked.steps):
        batch = answers(collate(pairs[2 * step : 2 * step + 2]))  # the same on all ranks of a sequence
        with torch.no_grad():
            before = ratios(behind, batch)
        loss = -F.logsigmoid(asked.beta * (ratios(handle, batch, wrapped) - before)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if ranks == 1 or dist.get_rank() == 0:
        print(json.dumps({"losses": losses}))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

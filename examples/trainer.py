"""Fine-tune with Hugging Face's Trainer on sequences divided over ranks; the same script for every launcher.

    torchrun --nproc-per-node 8 examples/trainer.py --model Qwen/Qwen3-8B --data train.jsonl \
        --sequence_parallel_size 8 --bf16 --fsdp --output_dir out/trainer

Without --model and --data it trains a tiny random model on random tokens, which takes seconds on two CPU processes.
docs/launching.md has the commands for torchrun, accelerate, DeepSpeed and Slurm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from longspan.integrations.trainer import enable


@dataclass
class Task:
    """What to train, and on how many ranks a sequence lies."""

    sequence_parallel_size: int = 2
    model: str | None = None
    data: str | None = None  # JSON lines with input_ids, and labels where they differ
    max_tokens: int = 131072


def build(task: Task, args: TrainingArguments) -> Any:
    """Return the model."""
    dtype = torch.bfloat16 if args.bf16 and not args.fsdp else torch.float32
    if task.model is not None:
        return AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype)
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


def rows(task: Task) -> list[dict[str, Any]]:
    """Return the data set, in tokens."""
    if task.data is None:
        draw = torch.Generator().manual_seed(0)
        found = [torch.randint(1, 64, (40 + 7 * (i % 5),), generator=draw).tolist() for i in range(16)]
        return [{"input_ids": ids, "labels": ids} for ids in found]
    lines = [json.loads(line) for line in Path(task.data).read_text(encoding="utf-8").splitlines()]
    cut = [{name: values[: task.max_tokens] for name, values in line.items()} for line in lines]
    return [{"input_ids": row["input_ids"], "labels": row.get("labels", row["input_ids"])} for row in cut]


def main() -> None:
    """Train, evaluate on the first rows, and save."""
    parser = HfArgumentParser([Task, TrainingArguments])  # type: ignore[arg-type]
    task, args = parser.parse_args_into_dataclasses()
    data: Any = rows(task)
    trainer = Trainer(
        build(task, args), args, train_dataset=data, eval_dataset=data[:4], data_collator=DataCollatorWithFlattening()
    )
    enable(trainer, task.sequence_parallel_size)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(json.dumps({"losses": losses, "eval_loss": metrics["eval_loss"]}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

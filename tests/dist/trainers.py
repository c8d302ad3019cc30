"""Trainers of a tiny model on processes of the pool, and what is compared of them."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)

from longspan.check.float64 import float64_throughout
from longspan.integrations.trainer import enable
from steps import adapted

VOCABULARY = 53
STEPS = 3
METRICS = ("entropy", "mean_token_accuracy", "num_tokens", "eval_entropy", "eval_mean_token_accuracy", "aux_loss")
"""What TRL's trainer reports besides the loss."""
LENGTHS = (17, 30, 9, 25, 12, 21, 14, 28, 11, 19, 8, 16)


@dataclass(frozen=True)
class Case:
    """A run: three optimizer steps of two micro-batches of two rows, over all data ranks."""

    engine: str = "ddp"
    world: int = 1
    size: int = 1
    kind: str = "trainer"
    lora: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    cp_axis: bool = False

    @property
    def zero(self) -> bool:
        """Whether DeepSpeed holds the parameters, which computes in fp32 at most."""
        return self.engine.startswith("zero")

    @property
    def wide(self) -> bool:
        """Whether all is computed in fp64."""
        return not (self.zero or self.arguments.get("optim") == "sgd")


def build(seed: int = 7, lora: bool = False, **changed: Any) -> Any:
    """Build a model in fp64."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = LlamaConfig(**(sizes | changed))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float64).to(torch.float64)
    return adapted(model) if lora else model


def rows(count: int = 12) -> list[dict[str, list[int]]]:
    """Return rows of unlike lengths and numbers of targets; the third micro-batch of two has no target at all."""
    made = []
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        ids = torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(index)).tolist()
        masked = length if index in (4, 5) else (0, 11, 4, 5)[index % 4]
        made.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return made


class Padded:
    """Pad on the right."""

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(e["input_ids"]) for e in examples)
        fill = {"input_ids": 0, "labels": -100}
        batch = {
            name: torch.tensor([list(e[name]) + [value] * (longest - len(e[name])) for e in examples])
            for name, value in fill.items()
        }
        lengths = torch.tensor([len(e["input_ids"]) for e in examples])
        return batch | {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def experts() -> Any:
    """Build a model of experts in fp64, whose auxiliary loss counts."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 24, "moe_intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    routers = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "output_router_logits": True}
    config = Qwen3MoeConfig(**sizes, **heads, **routers, initializer_range=0.3, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    return model.to(torch.float64)


@contextmanager
def precise(case: Case) -> Iterator[None]:
    """Compute in fp64 where the case does."""
    with float64_throughout() if case.wide else nullcontext():
        yield


@contextmanager
def accelerated(case: Case) -> Iterator[None]:
    """Start accelerate anew, as a launcher would for this engine; on the CPU it must be told that FSDP2 can run."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def reset() -> None:
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        PartialState._reset_state()

    before = dict(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="localhost",
        MASTER_PORT="29511",
    )
    reset()
    try:
        with _deepspeed() if case.zero else nullcontext():
            yield
    finally:
        reset()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _deepspeed() -> Iterator[None]:
    """Have what DeepSpeed expects, and its groups made anew, as the processes of the pool may be others than before."""
    from deepspeed import comm
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def forget() -> None:
        groups._release_process_group_references(None)
        comm.comm.cdb = None
        unset_hf_deepspeed_config()  # or models of later cases would be divided as they are made

    with importlib.import_module("launched").launched():
        forget()
        yield
        forget()


def arguments(case: Case, folder: str, kind: Any = TrainingArguments, **changed: Any) -> Any:
    """Return the training arguments of a case: two rows over all data ranks, accumulated twice."""
    replicas = case.world // case.size
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 2 // replicas,
        "per_device_eval_batch_size": 2 // replicas,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "max_grad_norm": 0.5,
        "ddp_backend": "gloo",
        "dataloader_pin_memory": False,
        "bf16": False,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
    }
    if case.engine == "fsdp2":
        settings |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}
        if case.cp_axis:
            from accelerate import ParallelismConfig

            settings["parallelism_config"] = ParallelismConfig(cp_size=case.size, dp_shard_size=replicas)
    if case.zero:
        settings |= {"deepspeed": zero_config(int(case.engine[-1])), "optim": "sgd", "learning_rate": 0.1}
    made = kind(**(settings | case.arguments | changed))
    if case.zero:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if case.engine == "fsdp2":
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        _ = made._setup_devices  # makes the state, which is then changed
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return made


def zero_config(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's settings as users of Trainer write them."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000},  # by default gibibytes a process
    }


def whole(model: Any) -> dict[str, Tensor]:
    """Return the whole values of what is trained."""
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            found[name.removeprefix("module.")] = _whole(p)
    return found


def _whole(p: Any) -> Tensor:
    value = p.detach()
    if hasattr(p, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([p]):
            return value.clone()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def make(case: Case, folder: str, **parts: Any) -> Any:
    """Make the trainer of a case."""
    model = parts.pop("model", None) or (experts() if case.kind == "experts" else build(lora=case.lora))
    model = model if case.wide else model.float()
    changed = parts.pop("arguments", {})
    if case.kind in ("sft", "chat", "experts"):
        return sft(case, folder, model, changed, parts)
    options: dict[str, Any] = {"train_dataset": rows(), "eval_dataset": rows()[:5]} | parts
    collator = DataCollatorWithFlattening() if case.kind == "flat" else Padded()
    options.setdefault("data_collator", collator)
    return Trainer(model, arguments(case, folder, **changed), **options)


def smooth(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a loss of one's own, of all logits."""
    logits = outputs.logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses.square().sum() / (1 if num_items_in_batch is None else num_items_in_batch)


def tokenizer() -> Any:
    """Return a tokenizer of whole words, t1 to t52, with a chat template that marks what an assistant says."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<end>": 1, "<user>": 2, "<assistant>": 3} | {f"t{i}": i for i in range(4, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")
    made.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<assistant> ' }}{% generation %}"
        "{{ m['content'] + ' <end> ' }}{% endgeneration %}{% else %}{{ '<user> ' + m['content'] + ' ' }}{% endif %}"
        "{% endfor %}"
    )
    return made


def chats(count: int) -> list[dict[str, Any]]:
    """Return conversations of unlike lengths."""
    made = []
    for index in range(count):
        draw = torch.Generator().manual_seed(index)
        words = [f"t{int(i)}" for i in torch.randint(4, VOCABULARY, (LENGTHS[index % 12],), generator=draw)]
        half = len(words) // 2
        turns = [{"role": "user", "content": " ".join(words[:half])}]
        made.append({"messages": turns + [{"role": "assistant", "content": " ".join(words[half:])}]})
    return made


def sft(case: Case, folder: str, model: Any, changed: dict[str, Any], parts: dict[str, Any]) -> Any:
    """Make TRL's trainer: the rows of `rows`, or packed conversations of which the assistant's part is learned."""
    from datasets import Dataset, disable_progress_bars
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    disable_progress_bars()
    chat = case.kind == "chat"
    found = Dataset.from_list(chats(40) if chat else rows())
    settings: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    if chat:
        settings = {"packing": True, "max_length": 48, "eval_packing": True, "assistant_only_loss": True}
    args = arguments(case, folder, SFTConfig, **settings, **changed)
    options = {"train_dataset": found, "eval_dataset": found.select(range(5)), "processing_class": tokenizer()}
    trainer: Any = SFTTrainer(model, args, **(options | parts))
    trainer.train_dataset = trainer.train_dataset.select(range(12))
    return trainer


def run(case: Case) -> dict[str, Any]:
    """Train, evaluate, and return what must equal one process."""
    with accelerated(case), precise(case), tempfile.TemporaryDirectory() as folder:
        trainer = make(case, folder)
        start = whole(trainer.model)
        if case.size > 1:
            enable(trainer, None if case.cp_axis else case.size, **case.options)
            assert trainer.get_total_train_batch_size(trainer.args) == 4
        evaluated = trainer.evaluate() if case.engine in ("none", "ddp") else {}
        trainer.train()
        evaluated_after = trainer.evaluate()
        end = whole(trainer.model)
        sharded = any(isinstance(p, DTensor) for p in trainer.model.parameters())
        assert sharded == (case.engine == "fsdp2"), "another engine than asked for"
        if case.zero:
            assert trainer.deepspeed.zero_optimization_stage() == int(case.engine[-1])
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {
            "losses": [entry["loss"] for entry in logs],
            "norms": [entry["grad_norm"] for entry in logs if "grad_norm" in entry],  # stage 0 tells none
            "metrics": [{k: e[k] for k in METRICS if k in e} for e in trainer.state.log_history],
            "eval": [m["eval_loss"] for m in (evaluated, evaluated_after) if m],
            "moved": {name: end[name] - start[name] for name in end},
            "flos": trainer.state.total_flos,
        }

"""DeepSpeed's Arctic Long Sequence Training: Ulysses, ZeRO-3, tiled MLP and loss, checkpoints in host memory.

    torchrun --nproc-per-node 2 benchmarks/peers/alst.py --offload --seq-len 32768 131072

`longspan bench step --peers` runs it.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from types import MethodType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP, UlyssesSPAttentionHF
from torch import Tensor
from transformers import AutoModelForCausalLM
from trial import IGNORED, arguments, config_of, join, measure

LOGITS_BYTES = 1 << 30


def tile_mlp(mlp: Any) -> None:
    """Make an MLP run in as many tiles as the hidden size goes into the sequence, on every rank alike."""
    plain = mlp.forward
    weights = [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]

    def forward(self: Any, x: Tensor) -> Tensor:
        tiles = torch.tensor(math.ceil(x.shape[1] / x.shape[2]), device=x.device)
        dist.all_reduce(tiles, dist.ReduceOp.MAX)
        return TiledMLP.apply(lambda _, part: plain(part), self, x, int(tiles), weights)

    mlp.forward = MethodType(forward, mlp)


def checkpoints_on_host() -> Any:
    from deepspeed.runtime.activation_checkpointing.offload_activations import (
        get_checkpoint_hidden_states_offloading_ctx_manager,
    )

    return get_checkpoint_hidden_states_offloading_ctx_manager()


def settings(size: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": size,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.0, "betas": [0.9, 0.95], "weight_decay": 0.0, "torch_adam": True},
        },
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--no-offload", dest="offload", action="store_false", help="checkpoints stay on the GPU")
    options = parser.parse_args()
    _, size = join()
    deepspeed.init_distributed("nccl")
    config = config_of(options)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=folder,
            core_attn_implementation=options.attention,
            sequence_parallel_size=size,
            micro_batch_size=1,
            seq_length_is_variable=True,
        )
    torch.manual_seed(options.seed)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=options.attention
        )
    for layer in model.model.layers:
        tile_mlp(layer.mlp)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(config=settings(size), model=model, model_parameters=model.parameters(), mpu=mpu)
    torch.cuda.empty_cache()
    offloading = checkpoints_on_host() if options.offload else contextlib.nullcontext()

    def step(ids: Tensor, positions: Tensor, targets: Tensor, count: int, lr: float) -> Tensor:
        def share(head: Any, hidden: Tensor, wanted: Tensor) -> Tensor:
            logits = head(hidden).float().flatten(0, -2)
            total = F.cross_entropy(logits, wanted.flatten(), ignore_index=IGNORED, reduction="sum")
            return total * (size / count)  # here, as what scales the loss later misses the head's gradient

        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        inner = engine.module
        tiles = max(1, math.ceil(ids.shape[1] * config.vocab_size * 4 / LOGITS_BYTES))
        with offloading:
            hidden = inner.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            loss = TiledFusedLogitsLoss.apply(
                share, inner.lm_head, hidden, targets, None, tiles, [inner.lm_head.weight], "sum"
            )
            engine.backward(loss)
        engine.step()
        return loss.detach() / size

    about = {"version": deepspeed.__version__, "attention": options.attention}
    about["memory"] = f"checkpoints {'on the host' if options.offload else 'on the GPU'}, {options.attention}"
    measure(options, step, config.vocab_size, about)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

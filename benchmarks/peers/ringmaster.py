"""axolotl-ringmaster: Ulysses around a transformers kernel, FSDP2, checkpointing of layers, and a loss in tiles.

    torchrun --nproc-per-node 2 benchmarks/peers/ringmaster.py --liger --seq-len 32768 131072

Attention is FlashAttention-4 where it is installed, else PyTorch's. `longspan bench step --peers` runs it.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this script's folder last: its own name is that of the package it runs

import ringmaster
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from trial import IGNORED, arguments, config_of, join, measure

TILE = 4096


class TiledLoss(torch.autograd.Function):
    """Cross-entropy summed over tokens, with gradients made tile by tile in forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], TILE):
            rows, wanted = hidden[start : start + TILE], targets[start : start + TILE]
            with torch.enable_grad():
                logits = (rows.detach() @ weight.detach().t()).float().requires_grad_()
                loss = F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
            (dlogits,) = torch.autograd.grad(loss, logits)
            dlogits = dlogits.to(hidden.dtype)
            dhidden[start : start + TILE] = dlogits @ weight
            dweight += dlogits.t() @ rows
            total += loss.detach()
        ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors
        return dhidden * grad, dweight * grad, None


class WithLoss(nn.Module):
    """A causal language model that returns the sum of its tokens' losses."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return TiledLoss.apply(hidden[0], self.model.lm_head.weight, targets[0])  # type: ignore[no-any-return]


def main() -> None:
    parser = arguments(__doc__)
    default = "flash_attention_4" if find_spec("flash_attn") and find_spec("flash_attn.cute") else "sdpa"
    parser.add_argument("--inner", default=default, help="transformers' attention that Ulysses wraps")
    parser.add_argument("--liger", action="store_true", help="Liger's RMSNorm, RoPE and SwiGLU")
    options = parser.parse_args()
    rank, size = join()
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    config = config_of(options)
    mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("cp",))
    runtime = ringmaster.setup(
        ringmaster.RingmasterConfig(size=size, backend=ringmaster.Backend.ULYSSES),
        num_kv_heads=config.num_key_value_heads,
        device_mesh=mesh,
        inner_attn=options.inner,
    )
    torch.manual_seed(options.seed)
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
    model.set_attn_implementation(runtime.attn_implementation)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    whole: Any = WithLoss(model.float().train())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(whole, mp_policy=policy)
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(ids: Tensor, positions: Tensor, targets: Tensor, count: int, lr: float) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = whole(ids, positions, targets) / count
        (loss * size).backward()  # FSDP2 averages over ranks
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    about = {"version": version("axolotl-ringmaster"), "attention": options.inner, "liger": options.liger}
    about["memory"] = f"checkpointing, {options.inner}" + (", Liger" if options.liger else "")
    measure(options, step, config.vocab_size, about)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

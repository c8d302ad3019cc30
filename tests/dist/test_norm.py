"""The final norm of models with streamed layers runs in tiles: exact, found by name, and without copies of a shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig

import longspan
from longspan import tiling
from longspan.integrations.transformers.norm import NormForward
from longspan.integrations.transformers.parts import Parts
from longspan.keep import Keep, Memory
from longspan.loss import tiled_loss
from longspan.tiled import tile
from models import Rows, build
from pool import RunRanks
from test_parity import exact, worst
from test_stream import PACKED, streamed_errors

pytestmark = pytest.mark.dist

STREAMED = Memory(4, Keep.X_O)


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2)], ids=["one", "u2", "r2"])
def test_it_is_exact(run_ranks: RunRanks, degrees: tuple[int, int]) -> None:
    for rows in (PACKED, Rows([[9, 4], [1]])):
        results = run_ranks(degrees[0] * degrees[1], streamed_errors, "llama", degrees, rows, STREAMED)
        assert exact(results), worst(results)


def watched() -> None:
    """The norm runs in tiles in a sharded forward pass and in backward, whole in bypass, and plainly after removal."""
    model, seen = build("llama"), []
    norm = model.model.norm
    real = type(norm).forward
    handle = longspan.prepare(model, 1, memory=STREAMED)
    assert isinstance(norm.forward, NormForward)
    norm.forward.original = lambda x: seen.append(x.shape[1]) or real(norm, x)
    norm.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    part = handle.shard(Rows([[10]]).batch())
    loss = model(**part).loss
    assert seen == [4, 4, 2, 10], "hooks see all tokens"
    loss.backward()
    assert seen[4:] == [4, 4, 2]
    with handle.bypass():
        model(input_ids=torch.ones(1, 9, dtype=torch.long))
    assert seen[7:] == [9, 9]
    handle.remove()
    assert "forward" not in norm.__dict__
    assert "norm" not in handle.plan.explain()
    plain = longspan.prepare(model, 1, memory=Memory())
    assert "forward" not in norm.__dict__, "layers that keep their graph leave it alone"
    plain.remove()


def test_it_runs_in_tiles(run_ranks: RunRanks) -> None:
    run_ranks(1, watched)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


def test_it_is_found_or_left_alone() -> None:
    sizes: dict[str, Any] = {"vocab_size": 37, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(**sizes, n_embd=16))
    neox = AutoModelForCausalLM.from_config(GPTNeoXConfig(**sizes, hidden_size=16, intermediate_size=16))
    assert Parts.of(gpt2).norm is gpt2.transformer.ln_f
    assert Parts.of(neox).norm is neox.gpt_neox.final_layer_norm
    assert Parts.of(build("llama", torch.bfloat16)).norm is not None
    for other in (Mixing(), nn.Linear(7, 7), nn.GRU(24, 24).double()):
        model = build("llama")
        model.model.norm = other
        assert Parts.of(model).norm is None
    renamed = build("llama")
    renamed.model.last, renamed.model.norm = renamed.model.norm, nn.Identity()
    head = renamed.lm_head.forward
    renamed.lm_head.forward = lambda x: head(renamed.model.last(x))
    del renamed.model.norm
    renamed.model.norm = lambda x: x
    handle = longspan.prepare(renamed, 1, memory=STREAMED)
    assert "the norm after the layers has no known name and runs whole" in handle.plan.reasons
    handle.remove()
    assert longspan.prepare(renamed, 1).plan.reasons == handle.plan.reasons[:-1]


class Allocations(TorchDispatchMode):
    """Follow new storages: the largest, and how many of a full length are alive at a time."""

    def __init__(self, full_bytes: int) -> None:
        super().__init__()
        self.full_bytes, self.largest, self.peak = full_bytes, 0, 0
        self.alive: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in old:
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, storage.nbytes())
                if storage.nbytes() >= self.full_bytes:
                    self.alive[storage._cdata] = StorageWeakRef(storage)
        self.alive = {key: ref for key, ref in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, len(self.alive))
        return result


def test_norm_and_loss_make_no_wide_copy_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last layer's output to its gradient: three tensors [s, d] in bf16 at a time, and none of float32."""
    s, d, vocabulary = 512, 64, 40
    monkeypatch.setattr(tiling, "_SLICE_ELEMENTS", 32 * d)
    model = build("llama", torch.bfloat16)
    norm = type(model.model.norm)(d).bfloat16()
    head = nn.Linear(d, vocabulary, bias=False).bfloat16()
    labels = torch.randint(vocabulary, (1, s))
    full_bytes = s * d * 2
    factor = torch.tensor(0.3)

    def stage(tiled: bool) -> Allocations:
        leaf = torch.randn(1, s, d, dtype=torch.bfloat16, requires_grad=True)
        with Allocations(full_bytes) as seen:
            x = leaf * 1  # what the last layer returned
            hidden = tile(norm, x, tile_tokens=32) if tiled else norm(x)
            loss = tiled_loss(hidden, head, labels, tile_tokens=32) * factor
            del x, hidden
            loss.backward()
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() > 0
        return seen

    ours, plain = stage(True), stage(False)
    assert plain.largest == 2 * full_bytes, "the norm itself computes in float32"
    assert ours.largest == full_bytes
    assert ours.peak == 3
    assert plain.peak > ours.peak

"""What would go wrong in streamed layers without a sign, each seen or refused."""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import longspan
from dense import relative
from longspan.errors import ModelError
from longspan.keep import Keep, Memory
from longspan.stream.prefix import Prefix
from models import Rows, build, gradients
from pool import RunRanks

pytestmark = pytest.mark.dist

ROWS = Rows([[9, 1, 13], [4, 8]], seed=1)


def nested_case(keep: Keep, backend: str | None) -> None:
    model = build("llama", torch.float32)
    handle = longspan.prepare(model, 2, memory=Memory(12, keep, backend))
    for layer in model.model.layers:
        fully_shard(layer.mlp)
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(ModelError, match=r"model.layers.0 .*mlp is sharded by fully_shard inside a streamed layer"):
        model(**handle.shard(ROWS.batch()))


@pytest.mark.parametrize(("keep", "backend"), [(Keep.X_O, None), (Keep.NONE, None), (Keep.GRAPH, "eager")])
def test_modules_sharded_inside_a_layer_are_refused(run_ranks: RunRanks, keep: Any, backend: str | None) -> None:
    if keep is Keep.NONE:
        keep = (Keep.X, Keep.NONE)
    run_ranks(2, nested_case, keep, backend)


class _Sum(nn.Module):
    """A projection whose weight is the sum of two: autograd hands both the same gradient tensor."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.more = linear.weight, nn.Parameter(torch.randn_like(linear.weight))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.more)


def shared_gradient_case(memory: Any) -> float:
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj, layer.self_attn.v_proj = _Sum(layer.mlp.down_proj), _Sum(layer.self_attn.v_proj)
    plain = copy.deepcopy(model)
    for each, way in ((model, memory), (plain, "auto")):
        handle = longspan.prepare(each, 1, memory=way)  # type: ignore[arg-type]
        each(**handle.shard(ROWS.batch())).loss.backward()
    found, wanted = gradients(model), gradients(plain)
    assert all(torch.equal(found[n], found[n.replace("weight", "more")]) for n in found if "down_proj.weight" in n)
    assert len({g.data_ptr() for g in found.values()}) == len(found), "each has memory of its own"
    return max(relative(found[name], wanted[name]) for name in wanted)


def test_parameters_that_share_a_gradient_tensor_keep_their_own(run_ranks: RunRanks) -> None:
    for tile in (4, 12, 1000):
        (error,) = run_ranks(1, shared_gradient_case, Memory(tile, Keep.X_O))
        assert error <= 1e-7  # rotary tables and norms round in fp32, in both


def alive_outputs(surrounded: bool) -> int:
    """Count the attention outputs that live on after a forward pass, where a checkpoint may surround the model."""
    model = build("llama")
    handle = longspan.prepare(model, 1, memory=Memory(8, Keep.X_O))
    part = handle.shard(ROWS.batch())
    outs: list[StorageWeakRef] = []
    real = Prefix.forward

    def seen(self: Prefix, *args: Any) -> tuple[Tensor, Tensor]:
        out, lse = real(self, *args)
        outs.append(StorageWeakRef(out.untyped_storage()))
        return out, lse

    with patch.object(Prefix, "forward", seen):
        loss = checkpoint(lambda: model(**part).loss, use_reentrant=False) if surrounded else model(**part).loss
        gc.collect()
        alive = sum(not out.expired() for out in outs)
        loss.backward()
        del loss
    assert len(outs) == 6 * (2 if surrounded else 1)
    return alive


def test_an_outer_checkpoint_frees_attention_outputs(run_ranks: RunRanks) -> None:
    assert run_ranks(1, alive_outputs, True) == [0]
    assert run_ranks(1, alive_outputs, False) == [6]


def quiet_hooks_case(memory: Any) -> None:
    """A parameter's hook sees its whole gradient, once, and what it returns counts once."""
    model = build("llama")
    plain = copy.deepcopy(model)
    for each, way in ((model, memory), (plain, "auto")):
        for p in each.parameters():
            p.register_hook(lambda g: g / 2)
        handle = longspan.prepare(each, 1, memory=way)  # type: ignore[arg-type]
        each(**handle.shard(ROWS.batch())).loss.backward()
    found, wanted = gradients(model), gradients(plain)
    assert max(relative(found[name], wanted[name]) for name in wanted) <= 1e-7


def test_hooks_on_parameters_act_once(run_ranks: RunRanks) -> None:
    run_ranks(1, quiet_hooks_case, Memory(4, Keep.X_O))

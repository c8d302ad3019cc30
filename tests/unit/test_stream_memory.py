"""The memory that streamed layers and the tiled loss take, by every tensor that is made, and their reads of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import longspan
from longspan.keep import Budget, Keep, Memory
from longspan.loss import tiled_loss
from longspan.plan.kept import Tier
from longspan.stream.mixing import PrefixMixing

FLOAT_BYTES = 4


class Tracked(TorchDispatchMode):
    """Adds up the bytes of the tensors that are made under it and still live."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and (key := t.untyped_storage()._cdata) not in known and key not in self.alive:
                self.alive[key] = StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self.alive.values()))
        return out


def peak_bytes(run: Callable[[], Any]) -> int:
    with Tracked() as tracked:
        run()
    return tracked.peak_bytes


def llama(layers: int = 2, **changed: int) -> Any:
    """Build a model whose MLPs and head are frozen, so that none of their memory is that of gradients."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 32,
        "num_hidden_layers": layers,
    } | changed
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    for name, p in model.named_parameters():
        p.requires_grad_("mlp" not in name and "lm_head" not in name)
    return model


def step_peak(width: int, tokens: int, memory: Any) -> int:
    model = llama(intermediate_size=width)
    handle = longspan.prepare(model, memory=memory)
    ids = torch.randint(32, (1, tokens))
    part = handle.shard({"input_ids": ids, "labels": ids})

    def step() -> None:
        model(**part).loss.backward()

    return peak_bytes(step)


TILE = 16
WIDTHS = (256, 2048)


def growth(tokens: int, memory: Any) -> int:
    """Return the bytes that a wider MLP adds to the peak."""
    return step_peak(WIDTHS[1], tokens, memory) - step_peak(WIDTHS[0], tokens, memory)


@pytest.mark.parametrize("keep", [Keep.X_O_KV, (Keep.X, Keep.NONE)])
def test_a_wider_mlp_costs_a_few_tiles_whatever_the_length(keep: Any) -> None:
    one_tile = TILE * (WIDTHS[1] - WIDTHS[0]) * FLOAT_BYTES
    found = [growth(tokens, Memory(TILE, keep)) for tokens in (48, 144)]
    assert found[0] == found[1]
    assert found[0] <= 7 * one_tile, found[0] / one_tile
    plain = [growth(tokens, "auto") for tokens in (48, 144)]
    assert plain[1] > 2.9 * plain[0] > 70 * one_tile, "the measure sees what layers keep whole"


def test_no_layer_of_a_rebuilt_segment_takes_more_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one attends again inside its own backward; its output, too, goes where budgets say."""
    tokens, keeps = 1024, (Keep.X, Keep.NONE, Keep.NONE) * 2
    model = llama(layers=len(keeps))
    budget = Budget(0, 1 << 26, moving_bytes=4096)
    handle = longspan.prepare(model, memory=Memory(TILE, keeps, rebuilt=Keep.OUT, budget=budget))
    ids = torch.randint(32, (1, tokens))
    peaks: dict[int, int] = {}
    mixing_backward = PrefixMixing.backward

    def measured(self: PrefixMixing, *args: Any) -> None:
        tracked.peak_bytes = 0
        mixing_backward(self, *args)
        peaks[len(keeps) - len(peaks) - 1] = tracked.peak_bytes

    monkeypatch.setattr(PrefixMixing, "backward", measured)
    with Tracked() as tracked:
        model(**handle.shard({"input_ids": ids, "labels": ids})).loss.backward()
    x_bytes = tokens * 16 * FLOAT_BYTES
    assert set(peaks) == set(range(len(keeps)))
    assert max(peaks.values()) - min(peaks.values()) < x_bytes / 2, {i: n / x_bytes for i, n in peaks.items()}


@pytest.mark.parametrize(
    ("keeps", "budget", "counts"),
    [
        ((Keep.X_O,) * 4, Budget(), {3}),
        ((Keep.X_O,) * 4, Budget(0, 1 << 26), {2}),
        ((Keep.X, Keep.NONE) * 2, Budget(0, 1 << 26), {2}),
    ],
)
def test_gradients_take_the_place_of_hidden_states(
    monkeypatch: pytest.MonkeyPatch, keeps: tuple[Keep, ...], budget: Budget, counts: set[int]
) -> None:
    """Those that stay are held by what made them; others are x, which becomes dx, and dy."""
    tokens, found = 1024, []
    model = llama(layers=len(keeps))
    handle = longspan.prepare(model, memory=Memory(TILE, keeps, budget=budget))
    ids = torch.randint(32, (1, tokens))
    mixing_backward = PrefixMixing.backward

    def counted(self: PrefixMixing, x: Tensor, kept: Any, keep: Keep, gradients: Any) -> None:
        mixing_backward(self, x, kept, keep, gradients)
        held = {t.untyped_storage()._cdata for t in (x, gradients.dx, gradients.dy)}
        assert all(t.nbytes == tokens * 16 * FLOAT_BYTES for t in (x, gradients.dx, gradients.dy))
        found.append(len(held))

    monkeypatch.setattr(PrefixMixing, "backward", counted)
    model(**handle.shard({"input_ids": ids, "labels": ids})).loss.backward()
    assert len(found) == len(keeps)
    assert set(found) == counts


def test_host_memory_is_given_back_with_the_handle() -> None:
    model = llama()
    handle = longspan.prepare(model, memory=Memory(TILE, Keep.X_O, budget=Budget(0, 1 << 24)))
    ids = torch.randint(32, (1, 48))
    model(**handle.shard({"input_ids": ids, "labels": ids})).loss.backward()
    memory = weakref.ref(handle.stash._stores[Tier.HOST].memory)  # type: ignore[attr-defined]
    assert memory() is not None
    handle.remove()
    assert memory() is None


def loss_peak(vocabulary: int, tokens: int, tile: int) -> int:
    hidden, weight = torch.randn(1, tokens, 16, requires_grad=True), torch.randn(vocabulary, 16)
    labels = torch.randint(vocabulary, (1, tokens))
    return peak_bytes(lambda: tiled_loss(hidden, weight, labels, tile_tokens=tile).backward())


def test_a_larger_vocabulary_costs_a_few_tiles_of_logits_whatever_the_length() -> None:
    one_tile = TILE * (WIDTHS[1] - WIDTHS[0]) * FLOAT_BYTES
    found = [loss_peak(WIDTHS[1], n, TILE) - loss_peak(WIDTHS[0], n, TILE) for n in (64, 256)]
    assert found[0] == found[1] <= 5 * one_tile, found[0] / one_tile
    whole = loss_peak(WIDTHS[1], 256, 256) - loss_peak(WIDTHS[0], 256, 256)
    assert whole > 40 * one_tile


class Reads(TorchDispatchMode):
    """Counts where the host waits for the value of a tensor."""

    WAITS = (
        "_local_scalar_dense",
        "nonzero",
        "equal",
        "is_nonzero",
        "unique",
        "masked_select",
        "repeat_interleave.Tensor",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(name in str(func) for name in self.WAITS)
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[Reads]:
    """Count reads by operators, and by methods that read memory directly."""
    with Reads() as counted:

        def counting(real: Any) -> Any:
            def read(t: Tensor, *args: Any, **kwargs: Any) -> Any:
                counted.count += t.dtype != torch.uint8  # states of generators are on the host
                return real(t, *args, **kwargs)

            return read

        with (
            patch.object(Tensor, "tolist", counting(Tensor.tolist)),
            patch.object(Tensor, "numpy", counting(Tensor.numpy)),
        ):
            yield counted


def moe(layers: int) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "moe_intermediate_size": 16,
        "vocab_size": 32,
        "num_hidden_layers": layers,
    }
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "head_dim": 8}
    config = Qwen3MoeConfig(**sizes, **experts, num_attention_heads=2, num_key_value_heads=1)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", experts_implementation="batched_mm"
    ).train()


def count_reads(model: Any, memory: Any) -> int:
    handle = longspan.prepare(model, memory=memory)
    ids, mask = torch.randint(32, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0
    part = handle.shard({"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask})
    with reads() as counted:
        model(**part).loss.backward()
    return counted.count


MEMORIES: dict[str, Any] = {
    "plain": "auto",
    "x+O": Memory(TILE, Keep.X_O),
    "x, none": Memory(TILE, (Keep.X, Keep.NONE)),
}


@pytest.mark.parametrize("make", [llama, moe])
@pytest.mark.parametrize("memory", MEMORIES)
def test_no_layer_makes_the_host_wait(make: Any, memory: str) -> None:
    way = MEMORIES[memory]
    deeper = Memory(TILE, (Keep.X, *[Keep.NONE] * 4)) if memory == "x, none" else way
    few, many = count_reads(make(2), way), count_reads(make(5), deeper)
    assert 0 < few == many
    with reads() as counted:
        assert torch.ones(3).tolist() and torch.ones(1).item() and len(torch.ones(3).nonzero())
    assert counted.count == 3

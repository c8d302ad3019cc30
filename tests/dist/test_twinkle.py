"""A strategy in Twinkle's manner: whole batches in, whole logits out, the gradients of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig

from longspan.errors import BatchError, ConfigError, TopologyError
from longspan.integrations.twinkle import SequenceParallelConfig, SequenceParallelStrategy

pytestmark = pytest.mark.dist
REL = 1e-10


def build(heads: int = 4, kv_heads: int = 2) -> Any:
    torch.manual_seed(7)
    sizes: Any = {"hidden_size": 8 * heads, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 53}
    sizes["head_dim"] = 8
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float64)


def batch(length: int = 21) -> dict[str, Tensor]:
    ids = torch.randint(53, (2, length), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(length) < torch.tensor([[length], [length - 4]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def own_loss(logits: Tensor) -> Tensor:
    """What a loop computes from whole logits, on every rank."""
    given = batch()
    logits = logits * given["attention_mask"][..., None]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())


def truth(heads: int, kv_heads: int) -> tuple[Tensor, float, dict[str, Tensor]]:
    model = build(heads, kv_heads)
    logits = model(**batch(), use_cache=False).logits
    loss = own_loss(logits)
    loss.backward()
    return logits.detach(), loss.item(), {name: p.grad for name, p in model.named_parameters()}


def train(way: str, heads: int, kv_heads: int) -> tuple[tuple[int, int], Tensor, float, dict[str, Tensor]]:
    size = dist.get_world_size()
    model = build(heads, kv_heads)
    settings: Any = {"ulysses_size": size, "gather_logits": True, "enabled": True}
    strategy = SequenceParallelStrategy(None, settings, model, tokenizer_id="none/needed")
    assert strategy.initialize() and strategy.initialize()
    handle = strategy.handle
    assert handle is not None
    if way == "the model's loss":
        out = model(**batch())
        loss = out.loss
    elif way == "loss of whole logits":
        out = model(batch()["input_ids"], attention_mask=batch()["attention_mask"])
        loss = own_loss(out.logits)
        assert strategy.postprocess(out) is out, "whole logits are not gathered again"
    else:
        part = strategy.preprocess_inputs(batch())
        assert part["input_ids"].shape[1] < 21 and "labels" not in part
        local = model(**part)
        assert local.logits.shape[:2] == part["input_ids"].shape
        out = strategy.postprocess_outputs(local) if way == "outputs" else local
        whole = out.logits if way == "outputs" else strategy.postprocess(local.logits)
        out, loss = SimpleNamespace(logits=whole), own_loss(whole)
    loss.backward()
    handle.reduce_gradients()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    strategy.remove()
    assert "forward" not in vars(model) and model(**batch()).logits.shape == (2, 21, 53)
    return (handle.mesh.ulysses.size, handle.mesh.ring.size), out.logits.detach(), loss.item(), gradients


@pytest.mark.parametrize("way", ["the model's loss", "loss of whole logits", "outputs", "logits"])
@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "degrees"),
    [(2, 4, 2, (2, 1)), (2, 3, 3, (1, 2)), (4, 4, 2, (2, 2)), (3, 4, 2, (1, 3))],
)
def test_whole_batches_train_as_in_one_process(
    run_ranks: Any, way: str, world: int, heads: int, kv_heads: int, degrees: tuple[int, int]
) -> None:
    true_logits, true_loss, true_gradients = truth(heads, kv_heads)
    real = batch()["attention_mask"].bool()
    for found, logits, loss, gradients in run_ranks(world, train, way, heads, kv_heads):
        assert found == degrees, "gcd of KV heads and ranks, and a ring of the rest"
        assert logits.shape == true_logits.shape
        torch.testing.assert_close(logits[real], true_logits[real], rtol=REL, atol=REL)
        assert loss == pytest.approx(true_loss, rel=REL)
        for name, value in true_gradients.items():
            # gradients are 3 times as large before they are averaged, and norms round them to float32 on their way
            rel = 3e-7 if world == 3 else REL
            assert (gradients[name] - value).norm() <= rel * value.norm(), name


def whole_batch_in_between() -> tuple[Tensor, Tensor]:
    """Return logits of a part that a whole batch of another length came after, and of that batch."""
    strategy = SequenceParallelStrategy(None, {"ulysses_size": 2}, build())
    strategy.initialize()
    model: Any = strategy.model
    part = strategy.preprocess_inputs(batch())
    between = model(**batch(11)).logits
    found = strategy.postprocess(model(**part)).logits
    strategy.remove()
    return found.detach(), between.detach()


def test_a_whole_batch_does_not_disturb_a_part(run_ranks: Any) -> None:
    wanted = [build()(**batch(length), use_cache=False).logits for length in (21, 11)]
    for found in run_ranks(2, whole_batch_in_between):
        for logits, expected, length in zip(found, wanted, (21, 11), strict=True):
            mask = batch(length)["attention_mask"][..., None]
            torch.testing.assert_close(logits * mask, (expected * mask).detach())


def two_parts(copies: bool) -> list[Tensor]:
    """Return whole logits of two parts, of other lengths, which are given back in the other order."""
    strategy = SequenceParallelStrategy(None, {"ulysses_size": 2}, build())
    strategy.initialize()
    model: Any = strategy.model
    parts = [strategy.preprocess_inputs({k: v for k, v in each.items() if k != "labels"}) for each in two_batches()]
    assert parts[0]["input_ids"].shape == parts[1]["input_ids"].shape, "so that shapes tell nothing"
    if not copies:
        made = [model(**part) for part in parts]
        return [strategy.postprocess(out).logits.detach() for out in reversed(made)][::-1]
    found = [strategy.postprocess(model(**part).logits * 1).detach() for part in parts]
    copied = [model(**part).logits * 1 for part in parts]
    with pytest.raises(BatchError, match="the model has run several times since .* strategy.handle.gather"):
        strategy.postprocess(copied[0])
    with pytest.raises(BatchError, match="the model has run not once since"):
        strategy.postprocess(copied[1])
    return found


def two_batches() -> list[dict[str, Tensor]]:
    whole = batch()
    return [whole, {"input_ids": whole["input_ids"].flip(1)}]


@pytest.mark.parametrize("copies", [False, True])
def test_outputs_find_the_part_they_are_of(run_ranks: Any, copies: bool) -> None:
    """A wrapper for mixed precision copies outputs; then only their order tells."""
    model = build()
    for found in run_ranks(2, two_parts, copies):
        for logits, given in zip(found, two_batches(), strict=True):
            real = given.get("attention_mask", torch.ones(2, 21))[..., None]
            expected = model(input_ids=given["input_ids"], attention_mask=real[..., 0]).logits * real
            torch.testing.assert_close(logits, expected.detach(), rtol=REL, atol=REL)


def settings() -> None:
    rank = dist.get_rank()
    model, whole = build(), {k: v for k, v in batch().items() if k != "labels"}
    expected = model(**whole).logits
    for off in ({"ulysses_size": 2, "enabled": False}, {"ulysses_size": 1}, None):
        strategy = SequenceParallelStrategy(None, off, model)
        assert strategy.initialize() is False
        assert strategy.preprocess_inputs(whole) == whole and strategy.postprocess(expected) is expected
        assert "forward" not in vars(model)

    given: Any = SequenceParallelConfig(2, gather_logits=False, ulysses_degree=1)
    strategy = SequenceParallelStrategy(None, given, model)
    with pytest.raises(ConfigError, match=r"initialize\(\)"):
        strategy.preprocess_inputs(whole)
    strategy.initialize()
    assert strategy.handle and strategy.handle.mesh.ring.size == 2
    local = model(**whole).logits
    assert local.shape[1] < 21 and strategy.postprocess(local) is local
    with strategy.handle.bypass():
        torch.testing.assert_close(model(**whole).logits, expected)
    with pytest.raises(BatchError, match="by name"):
        model(whole["input_ids"], whole["attention_mask"])
    strategy.remove()

    for mesh in (
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp")),
        init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
        SimpleNamespace(mesh=np.arange(2), ulysses_size=2),
    ):
        asked = {"ulysses_size": 2} if getattr(mesh, "mesh_dim_names", None) == ("fsdp",) else {}
        strategy = SequenceParallelStrategy(mesh, asked, model)
        assert strategy.initialize()
        torch.testing.assert_close(model(**whole).logits[0], expected[0])
        strategy.remove()

    backwards = SimpleNamespace(mesh=np.array([1, 0]))
    with pytest.raises(TopologyError, match=r"holds processes \[1, 0\]"):
        SequenceParallelStrategy(backwards, {"ulysses_size": 2}, model).initialize()
    with pytest.raises(ConfigError, match="ulysses_size 4, the device mesh 2"):
        SequenceParallelStrategy(SimpleNamespace(ulysses_size=2), {"ulysses_size": 4}, model).initialize()
    for wrong in ({"ulysses": 2}, {"ulysses_size": 0}, {"ulysses_size": 2.0}, {"gather_logits": "yes"}):
        with pytest.raises(ConfigError):
            SequenceParallelStrategy(None, wrong, model)
    assert rank == dist.get_rank()


def test_settings_and_meshes(run_ranks: Any) -> None:
    run_ranks(2, settings)

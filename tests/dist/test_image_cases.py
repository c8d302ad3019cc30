"""What else holds for models with a vision tower: adapters, borders, eval, generation, and mistakes that must show."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import longspan
from dense import TOLERANCE, relative
from longspan.batch import Shard
from longspan.check.float64 import float64_throughout
from longspan.errors import BatchError
from longspan.images import Route
from longspan.integrations.transformers.pictures import Pictures
from longspan.keep import Keep, Memory
from pictures import Album, build, gradients, one_device
from pool import RunRanks
from test_images import PACKED, SEVERAL, Case, train, wrong

pytestmark = pytest.mark.dist


def adapted(family: str, trained: str) -> Any:
    """Put adapters on the layers of the text trunk (`text`) or on the vision tower's alone (`tower`)."""
    from peft import LoraConfig, get_peft_model

    target = r".*language_model.*(q_proj|down_proj)" if trained == "text" else r".*visual\.blocks.*(qkv|proj)"
    model = get_peft_model(build(family), LoraConfig(r=2, target_modules=target)).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    return model.train()


def adapter_errors(family: str, trained: str) -> tuple[dict[str, float], bool]:
    """Return the errors of adapters' gradients, and whether the tower ran with a graph."""
    graphs: list[bool] = []
    with float64_throughout():
        model = adapted(family, trained)
        album = Album(family, SEVERAL)
        _, wanted = one_device(model, [album])
        handle = longspan.prepare(model, 2, memory=Memory(4, Keep.X_O))
        sight = handle.parts.sight
        assert sight is not None
        hook = sight.tower.register_forward_hook(lambda *a: graphs.append(a[-1].pooler_output.requires_grad))
        model(**handle.shard(album.batch())).loss.backward()
        hook.remove()
        handle.reduce_gradients()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    found = gradients(model)
    return {name: relative(found[name], wanted[name]) for name in wanted}, any(graphs)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("trained", ["text", "tower"])
def test_adapters(run_ranks: RunRanks, family: str, trained: str) -> None:
    """A frozen tower runs without a graph."""
    pytest.importorskip("peft")
    for errors, graph in run_ranks(2, adapter_errors, family, trained):
        assert errors
        assert max(errors.values()) <= TOLERANCE, errors
        assert graph == (trained == "tower")


def moved(family: str, borders: str) -> list[set[int]]:
    """Change a token, then a patch, of the third document; return the documents whose logits moved."""
    with float64_throughout(), torch.no_grad():
        handle = longspan.prepare(build(family), 2, ring_degree=2, logits=True)
        batch = Album(family, PACKED, borders=borders).batch()
        lengths = [d["input_ids"].shape[1] for d in Album(family, PACKED).alone()]
        owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

        def logits(batch: dict[str, Any]) -> Tensor:
            part = handle.shard(batch)
            return handle.gather(handle.model(**part).logits, part)

        before, found = logits(batch), []
        ids, pixels = batch["input_ids"].clone(), batch["pixel_values"].clone()
        ids[0, sum(lengths[:2])] += 1
        pixels[-1] += 1
        for changed in ({"input_ids": ids}, {"pixel_values": pixels}):
            far = (logits(batch | changed) != before).any(-1)[0]
            found.append(set(owners[far].tolist()))
    return found


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("borders", ["cu_seqlens", "[4, B, S]"])
def test_nothing_leaks_into_other_documents(run_ranks: RunRanks, family: str, borders: str) -> None:
    assert run_ranks(2, moved, family, borders) == [[{2}, {2}]] * 2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("borders", ["attention_mask", "[4, B, S]"])
def test_documents_are_told_in_several_ways(run_ranks: RunRanks, family: str, borders: str) -> None:
    assert not wrong(run_ranks, Case([[Album(family, PACKED, borders=borders)]], (2, 1)))


def shifted_rows() -> Any:
    """Give tokens the features of their neighbours."""
    right = Route.deliver

    def deliver(self: Route, *args: Any) -> tuple[Tensor, Tensor]:
        rows, zero = right(self, *args)
        return rows.roll(1, 0), zero

    return patch.object(Route, "deliver", deliver)


def halved_features() -> Any:
    """Divide the gradients of features by the ranks, as if engines had not done it."""
    right = Route.deliver

    def deliver(self: Route, features: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return right(self, features.detach() / 2 + features / 2, *args)

    return patch.object(Route, "deliver", deliver)


def text_positions() -> Any:
    """Count through images as through text."""

    def positions(self: Pictures, batch: Any) -> Tensor:
        return torch.arange(self.ids.shape[1]).expand(3, *self.ids.shape)

    return patch.object(Pictures, "positions", positions)


def shifted_labels() -> Any:
    """Give tokens the targets of their neighbours."""
    right = Shard.cut

    def cut(self: Shard, field: Tensor, fill: int | float = 0) -> Tensor:
        return right(self, field, fill).roll(1, 1)

    return patch.object(Shard, "cut", cut)


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "rows": shifted_rows,
    "gradients": halved_features,
    "positions": text_positions,
    "labels": shifted_labels,
}


def train_with(mistake: str, case: Case) -> Any:
    with MISTAKES[mistake]():
        return train(case)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(run_ranks: RunRanks, mistake: str) -> None:
    def run(world: int, _: Any, case: Case) -> Any:
        return run_ranks(world, train_with, mistake, case)

    assert wrong(run, Case([[Album("qwen3_vl", SEVERAL)]], (2, 1)))


def other_batches(family: str) -> str:
    handle = longspan.prepare(build(family), 2)
    batch = Album(family, SEVERAL, seed=handle.mesh.sequence.rank).batch()
    try:
        handle.model(**handle.shard(batch))
    except BatchError as error:
        return str(error)
    return ""


def test_different_batches_are_refused_before_images_are_exchanged(run_ranks: RunRanks) -> None:
    for told in run_ranks(2, other_batches, "qwen3_vl"):
        assert "were given different batches" in told

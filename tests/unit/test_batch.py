"""From a full batch to the parts of its ranks: nothing lost, nothing shifted across a border, nothing guessed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding, DataCollatorWithFlattening

from longspan.batch import CONTEXT, IGNORE_INDEX, Shard, count_targets, shard_batch, uncut
from longspan.errors import BatchError
from longspan.mesh import Axis, Mesh

WRONG = {"short": torch.rand(2, 3), "name": "a row"}


def mesh(ring: int, ulysses: int, rank: int) -> Mesh:
    """Return the mesh that one rank sees; sharding a batch needs no process group."""
    size = ring * ulysses
    return Mesh(
        ring=Axis(ring, rank // ulysses, tuple(range(ring))),
        ulysses=Axis(ulysses, rank % ulysses, tuple(range(ulysses))),
        sequence=Axis(size, rank, tuple(range(size))),
        world=Axis(size, rank, tuple(range(size))),
    )


def parts(batch: dict[str, Any], ring: int, ulysses: int, **options: Any) -> list[dict[str, Any]]:
    return [shard_batch(batch, mesh(ring, ulysses, rank), **options) for rank in range(ring * ulysses)]


def joined(found: list[dict[str, Any]], name: str) -> Tensor:
    return uncut([part[name] for part in found], found[0][CONTEXT].layout)


def one(batch: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    return shard_batch(batch, Mesh(), **options)


def batch_of(rows: int = 2, tokens: int = 11, **fields: Any) -> dict[str, Any]:
    ids = torch.arange(1, rows * tokens + 1).view(rows, tokens)
    return {"input_ids": ids, "labels": ids.clone(), **fields}


def shifted(labels: Tensor, starts: list[list[int]]) -> Tensor:
    """Write out the target of each token: the label of the next one of its document."""
    targets = torch.full_like(labels, IGNORE_INDEX)
    for row in range(labels.shape[0]):
        for t in range(labels.shape[1] - 1):
            if t + 1 not in starts[row]:
                targets[row, t] = labels[row, t + 1]
    return targets


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.data())
def test_parts_of_all_ranks_join_to_the_full_batch(
    ring: int, ulysses: int, rows: int, tokens: int, data: st.DataObject
) -> None:
    inner = st.sets(st.integers(1, tokens - 1)) if tokens > 1 else st.just(set())
    starts = [[0, *sorted(data.draw(inner))] for _ in range(rows)]
    positions = torch.stack(
        [torch.cat([torch.arange(b - a) for a, b in zip(s, [*s[1:], tokens], strict=True)]) for s in starts]
    )
    batch = batch_of(rows, tokens, position_ids=positions, weights=torch.rand(rows, tokens, 2))
    batch["labels"][torch.rand(rows, tokens) < 0.2] = IGNORE_INDEX
    before = copy.deepcopy(batch)
    found = parts(batch, ring, ulysses, token_fields=("weights",))
    targets = shifted(batch["labels"], starts)
    assert torch.equal(joined(found, "input_ids"), batch["input_ids"])
    assert torch.equal(joined(found, "weights"), batch["weights"])
    assert torch.equal(joined(found, "position_ids"), positions)
    assert torch.equal(joined(found, "shift_labels"), targets)
    assert sum(int((p["shift_labels"] != IGNORE_INDEX).sum()) for p in found) == found[0][CONTEXT].targets
    for part in found:
        shard: Shard = part[CONTEXT]
        assert set(part) == {"input_ids", "weights", "position_ids", "shift_labels", "use_cache", CONTEXT}
        assert part["use_cache"] is False
        assert part["input_ids"].shape == (rows, shard.layout.shard_tokens)
        assert shard.max_position == int(positions.max())
        assert shard.targets == int((targets != IGNORE_INDEX).sum())
        assert shard.schedule is shard.schedule
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_padding_of_the_layout_has_no_target_and_repeats_the_last_position() -> None:
    found = parts(batch_of(1, 5), 2, 1)
    last = found[0]  # holds pieces 0 and 3 of 8
    assert last["input_ids"].tolist() == [[1, 2, 0, 0]]
    assert last["position_ids"].tolist() == [[0, 1, 4, 4]]
    assert last["shift_labels"].tolist() == [[2, 3, IGNORE_INDEX, IGNORE_INDEX]]


def test_the_last_token_of_a_part_predicts_the_first_of_the_next() -> None:
    found = parts(batch_of(1, 8), 1, 2)
    assert found[0]["shift_labels"].tolist() == [[2, 3, 4, 5]]
    assert found[1]["shift_labels"].tolist() == [[6, 7, 8, IGNORE_INDEX]]


def test_one_rank_gets_the_batch_as_it_is() -> None:
    batch = batch_of()
    part = one(batch)
    assert torch.equal(part["input_ids"], batch["input_ids"])
    assert torch.equal(part["position_ids"], torch.arange(11).expand(2, 11))
    assert part[CONTEXT].lengths is None
    assert part[CONTEXT].mask.documents is None


def test_labels_stay_within_documents_from_cu_seqlens() -> None:
    part = one(batch_of(1, 6, cu_seqlens=[0, 1, 4, 6], max_seqlen=3))
    assert part["shift_labels"].tolist() == [[IGNORE_INDEX, 3, 4, IGNORE_INDEX, 6, IGNORE_INDEX]]
    assert part["position_ids"].tolist() == [[0, 0, 1, 2, 0, 1]]
    assert part[CONTEXT].mask.documents == ((0, 1, 4),)


def test_shift_labels_are_taken_as_they_are() -> None:
    batch = {"input_ids": torch.arange(6)[None], "shift_labels": torch.arange(6)[None] + 10, "cu_seqlens": [0, 3, 6]}
    assert torch.equal(one(batch)["shift_labels"], batch["shift_labels"])
    with pytest.raises(BatchError, match="labels or shift_labels, not both"):
        one({**batch, "labels": torch.arange(6)[None]})


def test_a_batch_without_labels_has_no_targets() -> None:
    part = one({"input_ids": torch.arange(6)[None], "labels": None})
    assert "shift_labels" not in part
    assert part[CONTEXT].targets == 0


def test_right_padding_becomes_lengths_and_hides_behind_causal_order() -> None:
    batch = batch_of(attention_mask=torch.tensor([[1] * 4 + [0] * 7, [1] * 11]))
    batch["labels"][0, 4:] = IGNORE_INDEX
    part = one(batch)
    assert "attention_mask" not in part
    assert part[CONTEXT].lengths == (4, 11)
    assert part[CONTEXT].targets == 3 + 10


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_targets_on_padding_are_refused(name: str) -> None:
    batch = batch_of(attention_mask=torch.tensor([[1] * 4 + [0] * 7, [1] * 11]))
    batch[name] = batch.pop("labels")
    with pytest.raises(BatchError, match=r"Row 0 has 7 labels on padding \(tokens 4 and later\); set them to -100"):
        one(batch)


def test_inputs_embeds_keep_their_gradient() -> None:
    embeds = torch.rand(1, 6, 3, requires_grad=True)
    found = parts({"inputs_embeds": embeds, "labels": torch.arange(6)[None]}, 2, 1)
    for part in found:
        part["inputs_embeds"].sum().backward()
    assert "input_ids" not in found[0]
    assert embeds.grad is not None
    assert torch.equal(embeds.grad, torch.ones_like(embeds))


def test_scalars_and_strings_pass_through() -> None:
    extra = {"name": "a row", "temperature": 0.5, "step": torch.tensor(3), "sources": ["a", "b"]}
    part = one(batch_of(**extra))
    assert {name: part[name] for name in extra} == extra
    assert part[CONTEXT].passed == tuple(extra)


@pytest.mark.parametrize("name", ["inputs_embeds", "token_type_ids", "cu_seqlens", "use_cache", "something"])
def test_a_field_that_is_none_is_absent(name: str) -> None:
    assert one({**batch_of(), name: None}).keys() == one(batch_of()).keys()


@pytest.mark.parametrize("items", [0, 19, torch.tensor(19)])
def test_a_step_has_no_fewer_targets_than_its_batch(items: Any) -> None:
    """The loss would be a sum in place of a mean, or larger than one."""
    for exact in (20, torch.tensor(20), torch.tensor(21, dtype=torch.int32)):
        assert one(batch_of(), num_items=exact)[CONTEXT].num_items is exact
    assert one({"input_ids": torch.arange(6)[None]}, num_items=0)[CONTEXT].num_items == 0
    with pytest.raises(
        BatchError, match=rf"num_items is {int(items)}, but this batch alone has 20 targets.*leave num_"
    ):
        one(batch_of(), num_items=items)


@pytest.mark.parametrize("name", ["input_ids", "labels", "shift_labels", "weights", "token_type_ids", "inputs_embeds"])
def test_batches_that_differ_in_a_field_have_other_fingerprints(name: str) -> None:
    def mark(change: int) -> int:
        fields = {**batch_of(), "weights": torch.ones(2, 11), "token_type_ids": torch.zeros(2, 11, dtype=torch.long)}
        if name == "shift_labels":
            fields[name] = fields.pop("labels")
        if name == "inputs_embeds":
            fields[name] = fields.pop("input_ids")[..., None].float()
        fields[name][1, 5] += change
        return one(fields, token_fields=("weights",))[CONTEXT].fingerprint

    assert mark(0) == mark(0)
    assert mark(0) != mark(1)


def test_num_items_travels_with_the_part() -> None:
    assert one(batch_of(), num_items=77)[CONTEXT].num_items == 77
    assert one(batch_of())[CONTEXT].num_items is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_small_integer_types_work(dtype: torch.dtype) -> None:
    batch = {"input_ids": torch.arange(6, dtype=dtype)[None], "labels": torch.arange(6)[None]}
    assert torch.equal(joined(parts(batch, 1, 2), "input_ids"), batch["input_ids"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"input_ids": None}, "needs input_ids or inputs_embeds"),
        ({"inputs_embeds": torch.rand(2, 11, 3)}, "and not both"),
        ({"input_ids": torch.arange(11)}, r"input_ids must be a tensor \[B, S\] with at least one token, got \[11\]"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, r"got \[2, 0\]"),
        ({"input_ids": torch.zeros(0, 11, dtype=torch.long)}, r"got \[0, 11\]"),
        ({"input_ids": [[1, 2]]}, "got list"),
        ({"input_ids": None, "inputs_embeds": torch.rand(2, 11)}, r"\[B, S, d\]"),
        ({"labels": torch.zeros(2, 10, dtype=torch.long)}, r"labels must be a tensor \[2, 11, ...\]"),
        ({"labels": [[1] * 11] * 2}, "labels must be a tensor .* got list"),
        ({"token_type_ids": torch.zeros(2, 3)}, r"token_type_ids must be a tensor \[2, 11, ...\]"),
        ({"pixel_values": torch.rand(2, 3, 4, 4)}, r"Field 'pixel_values' \[2, 3, 4, 4\] is not known"),
        ({"weights": torch.rand(2, 11)}, r"pass token_fields=\('weights',\)"),
        ({"past_key_values": object()}, "KV cache .* drop past_key_values; to generate"),
        ({"cache": object()}, "KV cache .* drop cache; to generate"),
        ({"use_cache": True}, "KV cache"),
        ({"attention_mask": torch.ones(2, 1, 11, 11)}, "per pair of tokens"),
        ({"attention_mask": torch.tensor([[0] + [1] * 10] * 2)}, "Pad on the right"),
        ({CONTEXT: object()}, "sharded already"),
        ({"input_ids": torch.rand(2, 11)}, r"input_ids must hold integers, .* got torch.float32"),
        ({"input_ids": torch.ones(2, 11, dtype=torch.bool)}, r"got torch.bool"),
        ({"labels": torch.rand(2, 11)}, r"labels must hold integers, .* got torch.float32"),
        ({"labels": None, "shift_labels": torch.rand(2, 11)}, r"shift_labels must hold integers"),
    ],
)
def test_a_batch_that_cannot_be_sharded_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(BatchError, match=told):
        one(batch_of(**fields))


@pytest.mark.parametrize("batch", [None, [1, 2], torch.arange(3)])
def test_a_batch_is_a_mapping(batch: Any) -> None:
    for reads in (one, count_targets):
        with pytest.raises(BatchError, match=f"A batch is a mapping .*, got {type(batch).__name__}"):
            reads(batch)


def test_token_fields_are_no_string() -> None:
    """Which would be read letter by letter."""
    with pytest.raises(BatchError, match=r"got 'weight'; pass \('weight',\)"):
        one(batch_of(weight=torch.ones(2, 11)), token_fields="weight")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("weight",), r"token_fields names 'weight', which the batch does not have"),
        (("labels",), "token_fields"),
        (("position_ids",), "token_fields"),
        (("short",), r"short must be a tensor \[2, 11, ...\]"),
        (("name",), r"name must be a tensor \[2, 11, ...\] .* got str"),
    ],
)
def test_token_fields_must_be_tokens_of_the_batch(names: tuple[str, ...], told: str) -> None:
    with pytest.raises(BatchError, match=told):
        one(batch_of(**{n: v for n, v in WRONG.items() if n in names}), token_fields=names)


def test_what_transformers_packs_is_understood() -> None:
    """All that its flattening collator can say about documents, at once."""
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10]}]
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows, return_tensors="pt")
    part = one(packed)
    assert part[CONTEXT].mask.documents == ((0, 3, 4),)
    assert part["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert part["shift_labels"].tolist() == [[6, 7, IGNORE_INDEX, IGNORE_INDEX, 10, IGNORE_INDEX]]
    assert set(part) == {"input_ids", "position_ids", "shift_labels", "use_cache", CONTEXT}


def test_what_transformers_pads_is_understood() -> None:
    batch = BatchEncoding(
        {"input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    )
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
    part = one(batch)
    assert part[CONTEXT].lengths == (2, 3)
    assert part["shift_labels"].tolist() == [[6, IGNORE_INDEX, IGNORE_INDEX], [8, 9, IGNORE_INDEX]]

"""Rows and steps: deterministic, disjoint between replicas, the same total for any division of the work."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.train.data import Corpus
from longspan.train.packing import Recipe, Step, pack, steps


def corpus(lengths: Sequence[int], labels: bool = False) -> Corpus:
    tokens = torch.arange(sum(lengths), dtype=torch.int32)
    targets = torch.where(tokens % 3 == 0, -100, tokens) if labels else None
    return Corpus(tokens, targets, torch.tensor([0, *itertools.accumulate(lengths)]))


def take(count: int, data: Corpus, recipe: Recipe, replica: int = 0) -> list[Step]:
    return list(itertools.islice(steps(data, recipe, replica), count))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_rows_hold_every_piece_once_in_order_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = list(pack(lengths, range(len(lengths)), 12))
    assert [index for row in rows for index in row] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 12 for row in rows)
    for row, following in itertools.pairwise(rows):
        assert sum(lengths[i] for i in row) + lengths[following[0]] > 12


def test_documents_keep_their_positions_labels_and_borders() -> None:
    (step,) = take(1, corpus([3, 2, 4]), Recipe(6, shuffle=False))
    (batch,) = step.micro_batches
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == batch["input_ids"].tolist()
    assert "attention_mask" not in batch
    assert (step.num_items, step.tokens, step.documents_tokens) == (3, 5, [3, 2])


def test_rows_of_unequal_length_are_padded_on_the_right() -> None:
    (step,) = take(1, corpus([3, 5]), Recipe(5, rows=2, shuffle=False))
    (batch,) = step.micro_batches
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist()[0] == [0, 1, 2, -100, -100]
    assert batch["position_ids"].tolist()[0] == [0, 1, 2, 3, 4]  # padding is not a new document
    assert step.tokens == 8


def test_without_packing_a_row_is_a_document() -> None:
    found = take(3, corpus([2, 2, 3]), Recipe(100, packing=False, shuffle=False))
    assert [step.documents_tokens for step in found] == [[2], [2], [3]]


def test_targets_are_counted_within_documents() -> None:
    data = corpus([4, 5], labels=True)
    (step,) = take(1, data, Recipe(9, shuffle=False))
    expected = sum(int((data.piece(i)[1][1:] != -100).sum()) for i in range(2))
    assert step.num_items == expected == 5


def test_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    data, recipe = corpus([2] * 20), Recipe(2, seed=3)
    first = [step.micro_batches[0]["input_ids"].tolist() for step in take(40, data, recipe)]
    again = [step.micro_batches[0]["input_ids"].tolist() for step in take(40, data, recipe)]
    other = [step.micro_batches[0]["input_ids"].tolist() for step in take(40, data, replace(recipe, seed=4))]
    assert first == again
    assert first != other
    assert first[:20] != first[20:]
    assert sorted(first[:20]) == sorted(first[20:])


def test_replicas_divide_a_step_and_agree_on_its_totals() -> None:
    data = corpus([2, 3, 4, 5, 3, 2, 6, 2], labels=True)
    one = Recipe(6, accumulation=4)
    two = Recipe(6, accumulation=2, replicas=2)
    for whole, left, right in zip(
        take(6, data, one), take(6, data, two, replica=0), take(6, data, two, replica=1), strict=True
    ):
        halves = [batch for pair in zip(left.micro_batches, right.micro_batches, strict=True) for batch in pair]
        assert [b["input_ids"].tolist() for b in halves] == [b["input_ids"].tolist() for b in whole.micro_batches]
        assert (left.num_items, left.tokens) == (right.num_items, right.tokens) == (whole.num_items, whole.tokens)

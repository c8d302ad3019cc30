"""Rows and steps: deterministic, disjoint between replicas, the same total for any division of the work."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.train.data import Corpus
from longspan.train.packing import Recipe, Step, epoch_rows, pack_best_fit, pack_in_order, steps


def corpus(lengths: Sequence[int], labels: bool = False) -> Corpus:
    tokens = torch.arange(sum(lengths), dtype=torch.int32)
    targets = torch.where(tokens % 3 == 0, -100, tokens) if labels else None
    return Corpus(tokens, targets, torch.tensor([0, *itertools.accumulate(lengths)]))


def take(count: int, data: Corpus, recipe: Recipe, replica: int = 0) -> list[Step]:
    return list(itertools.islice(steps(data, recipe, replica), count))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_rows_hold_every_piece_once_in_order_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = list(pack_in_order(lengths, range(len(lengths)), 12))
    assert [index for row in rows for index in row] == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 12 for row in rows)
    for row, following in itertools.pairwise(rows):
        assert sum(lengths[i] for i in row) + lengths[following[0]] > 12


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(12, 40), st.integers(0, 3))
def test_best_fit_holds_every_piece_once_and_wastes_no_more_than_in_order(
    lengths: list[int], capacity: int, epoch: int
) -> None:
    best = Recipe(capacity, seed=5)
    rows, in_order = epoch_rows(lengths, best, epoch), epoch_rows(lengths, replace(best, strategy="in-order"), epoch)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= capacity for row in rows)
    assert len(rows) <= len(in_order)
    assert rows == epoch_rows(lengths, best, epoch)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 70))
def test_best_fit_is_the_obvious_one(lengths: list[int], capacity: int) -> None:
    """The slow twin looks at every row for every piece."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces[spaces.index(min(fitting))] -= length
        else:
            spaces.append(capacity - length)
    rows = pack_best_fit(lengths, range(len(lengths)), capacity)
    assert sorted(capacity - sum(lengths[i] for i in row) for row in rows) == sorted(spaces)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8))
def test_best_fit_is_near_the_fewest_rows(lengths: list[int]) -> None:
    found = len(pack_best_fit(lengths, range(len(lengths)), 10))
    assert sum(lengths) / 10 <= found <= 11 / 9 * fewest(lengths, 10) + 1


def fewest(lengths: Sequence[int], capacity: int) -> int:
    """Try every way to put pieces into rows."""

    def place(index: int, spaces: tuple[int, ...]) -> int:
        if index == len(lengths):
            return len(spaces)
        fits = {i: space for i, space in enumerate(spaces) if space >= lengths[index]}
        tries = [tuple(s - lengths[index] * (j == i) for j, s in enumerate(spaces)) for i in fits]
        return min(place(index + 1, tuple(sorted(t))) for t in [*tries, (*spaces, capacity - lengths[index])])

    return place(0, ())


def test_best_fit_fills_what_in_order_leaves() -> None:
    lengths = [6, 7, 4, 3]
    assert [len(epoch_rows(lengths, Recipe(10, strategy=s, shuffle=False), 0)) for s in ("in-order", "best-fit")] == [
        3,
        2,
    ]
    assert epoch_rows(lengths, Recipe(10, shuffle=False), 0) == [[0, 2], [1, 3]]


def test_in_order_stands_in_where_it_needs_fewer_rows() -> None:
    lengths = [5, 3, 2, 4, 4, 2]  # already packed: best-fit puts 5 with 4, 4 with 3 and leaves a row for the rest
    assert len(pack_best_fit(lengths, range(6), 10)) == 3
    assert epoch_rows(lengths, Recipe(10, shuffle=False), 0) == [[0, 1, 2], [3, 4, 5]]


def test_shuffled_best_fit_rows_are_not_sorted_by_length() -> None:
    lengths = [*range(1, 101)] * 10
    rows = epoch_rows(lengths, Recipe(100, seed=1), 0)
    longest = [max(lengths[i] for i in row) for row in rows]
    half = len(rows) // 2
    assert abs(sum(longest[:half]) / half - sum(longest[half:]) / (len(rows) - half)) < 10
    assert [sorted(row) for row in rows] != [sorted(row) for row in epoch_rows(lengths, Recipe(100, seed=1), 1)]


def test_many_pieces_are_packed_in_about_linear_time() -> None:
    """A million take seconds; a quadratic search of rows would take hours."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 1 << 20) for _ in range(40_000)]
    start_s = time.process_time()
    rows = pack_best_fit(lengths, range(len(lengths)), 1 << 20)
    assert time.process_time() - start_s < 5
    assert sum(lengths) / (len(rows) << 20) > 0.98


def test_best_fit_goes_on_in_the_middle_of_an_epoch_on_another_number_of_replicas() -> None:
    data = corpus([5, 2, 3, 4, 1, 6, 2, 3, 4, 5, 2])
    one = Recipe(7, seed=2, accumulation=2)
    whole = take(9, data, one)
    rest = list(itertools.islice(steps(data, one, 0, rows_before=6), 6))
    assert [s.micro_batches[0]["input_ids"].tolist() for s in rest] == [
        s.micro_batches[0]["input_ids"].tolist() for s in whole[3:]
    ]
    two = replace(one, accumulation=1, replicas=2)
    right = itertools.islice(steps(data, two, 1, rows_before=6), 6)
    assert [s.micro_batches[0]["input_ids"].tolist() for s in right] == [
        s.micro_batches[1]["input_ids"].tolist() for s in whole[3:]
    ]


def test_documents_keep_their_positions_labels_and_borders() -> None:
    (step,) = take(1, corpus([3, 2, 4]), Recipe(6, strategy="in-order", shuffle=False))
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

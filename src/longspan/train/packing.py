"""Lay pieces of documents into rows and rows into optimizer steps: pure, deterministic, the same on every process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby, islice
from typing import Any

import torch
from torch import Tensor

from longspan.batch import IGNORE_INDEX
from longspan.train.data.corpus import Corpus
from longspan.train.data.rows import count_targets


@dataclass(frozen=True)
class Step:
    """What one optimizer step trains on.

    Args:
        micro_batches: this replica's full batches (every sequence-parallel rank of it gets the same), or parts of them.
        num_items: targets of the whole step, over all replicas and micro-batches.
        tokens: tokens of the whole step, each counted once, padding not at all.
        documents_tokens: lengths of all documents of the whole step.
    """

    micro_batches: list[dict[str, Any]]
    num_items: int
    tokens: int
    documents_tokens: list[int]


@dataclass(frozen=True)
class Recipe:
    """How rows become steps.

    Args:
        sequence_length: longest row, in tokens.
        packing: whether a row may hold several documents.
        strategy: of packing: `best-fit` or `in-order`.
        shuffle: whether each epoch has its own order.
        rows: rows per micro-batch.
        accumulation: micro-batches per step and replica.
        replicas: data-parallel size.
        seed: of the orders.
    """

    sequence_length: int
    packing: bool = True
    strategy: str = "best-fit"
    shuffle: bool = True
    rows: int = 1
    accumulation: int = 1
    replicas: int = 1
    seed: int = 0

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step."""
        return self.rows * self.accumulation * self.replicas


def steps(corpus: Corpus, recipe: Recipe, replica: int, rows_before: int = 0) -> Iterator[Step]:
    """Yield optimizer steps without end, epoch after epoch.

    A step's rows are dealt to replicas in turn, so replicas never share a row, and replicas x accumulation alone
    decides what a step trains on.

    Args:
        rows_before: rows that earlier steps have taken.
    """
    source = islice(_rows(corpus.lengths_tokens, recipe), rows_before, None)
    while True:
        micro_batches, num_items, lengths = [], 0, []
        for _ in range(recipe.accumulation):
            for turn in range(recipe.replicas):
                rows = [next(source) for _ in range(recipe.rows)]
                pieces = [[corpus.piece(index) for index in row] for row in rows]
                if turn == replica:
                    micro_batches.append(_batch(pieces))
                num_items += sum(count_targets(labels) for row in pieces for _, labels in row)
                lengths += [len(ids) for row in pieces for ids, _ in row]
        yield Step(micro_batches, num_items, sum(lengths), lengths)


def epoch_rows(lengths: Sequence[int], recipe: Recipe, epoch: int) -> list[list[int]]:
    """Lay the pieces of an epoch into rows: which pieces each row holds, in the order in which rows are taken.

    Best-fit rows are taken in a random order too, as they come out sorted by length; without shuffling, in the order of
    their earliest pieces. In-order rows stand in for them where they are fewer.
    """
    draw = random.Random(f"{recipe.seed}/{epoch}")
    order = list(range(len(lengths)))
    if recipe.shuffle:
        draw.shuffle(order)
    if not recipe.packing:
        return [[index] for index in order]
    rows = list(pack_in_order(lengths, order, recipe.sequence_length))
    if recipe.strategy == "in-order":
        return rows
    fitted = pack_best_fit(lengths, order, recipe.sequence_length)
    if len(fitted) > len(rows):
        return rows
    if recipe.shuffle:
        draw.shuffle(fitted)
        return fitted
    return sorted(sorted(row) for row in fitted)


def pack_in_order(lengths: Sequence[int], order: Sequence[int], capacity: int) -> Iterator[list[int]]:
    """Fill rows of `capacity` tokens in the given order; a piece that does not fit opens the next row."""
    row: list[int] = []
    used = 0
    for index in order:
        if row and used + lengths[index] > capacity:
            yield row
            row, used = [], 0
        row.append(index)
        used += lengths[index]
    if row:
        yield row


def pack_best_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Put pieces, the longest first, each into the fullest row that has room for it.

    Args:
        order: of pieces of the same length.

    Returns at most 11/9 of the fewest possible rows, and one more.

    **Cost**: O(n log n) and for each piece two operations on integers of sqrt(capacity) bits.

    **Source**: best-fit decreasing bin packing (Johnson, 1973).
    """
    rows: list[list[int]] = []
    room = _Room(capacity)
    longest_first = sorted(order, key=lengths.__getitem__, reverse=True)
    for length, group in groupby(longest_first, key=lengths.__getitem__):
        pieces = list(group)
        while pieces:
            space = room.smallest(length)
            if space is None:
                space, row = capacity, len(rows)
                rows.append([])
            else:
                row = room.take(space)
            fits = space // length  # the space that one of them leaves is the smallest for the next
            rows[row] += pieces[-fits:]
            room.put(space - length * len(pieces[-fits:]), row)
            del pieces[-fits:]
    return rows


class _Room:
    """Rows by the space they have left, which are found by a bitmap of two levels.

    Args:
        capacity: the largest space.
    """

    def __init__(self, capacity: int) -> None:
        self._shift = max(1, capacity.bit_length() // 2)
        self._words = [0] * ((capacity >> self._shift) + 1)
        self._filled = 0  # which words are not zero
        self._rows: dict[int, list[int]] = {}

    def put(self, space: int, row: int) -> None:
        """Note a row's space."""
        self._rows.setdefault(space, []).append(row)
        word = space >> self._shift
        self._words[word] |= 1 << (space - (word << self._shift))
        self._filled |= 1 << word

    def smallest(self, needed: int) -> int | None:
        """Return the smallest space that is large enough; None if there is none."""
        word = needed >> self._shift
        fits = self._words[word] >> (needed - (word << self._shift))
        if fits:
            return needed + _lowest(fits)
        above = self._filled >> (word + 1)
        if not above:
            return None
        word += 1 + _lowest(above)
        return (word << self._shift) + _lowest(self._words[word])

    def take(self, space: int) -> int:
        """Return a row of that space, and forget it."""
        rows = self._rows[space]
        row = rows.pop()
        if not rows:
            del self._rows[space]
            word = space >> self._shift
            self._words[word] &= ~(1 << (space - (word << self._shift)))
            if not self._words[word]:
                self._filled &= ~(1 << word)
        return row


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _rows(lengths: Sequence[int], recipe: Recipe) -> Iterator[list[int]]:
    for epoch in count():
        yield from epoch_rows(lengths, recipe, epoch)


def _batch(rows: list[list[tuple[Tensor, Tensor]]]) -> dict[str, Tensor]:
    ids = [torch.cat([ids for ids, _ in row]) for row in rows]
    labels = [torch.cat([labels for _, labels in row]) for row in rows]
    positions = [torch.cat([torch.arange(len(ids)) for ids, _ in row]) for row in rows]  # restart per document
    longest = max(len(row) for row in ids)
    batch = {
        "input_ids": torch.stack([_pad(row, longest, 0) for row in ids]),  # [B, S]
        "labels": torch.stack([_pad(row, longest, IGNORE_INDEX) for row in labels]),  # [B, S]
        "position_ids": torch.stack([_continue(row, longest) for row in positions]),  # [B, S]
    }
    if any(len(row) < longest for row in ids):
        batch["attention_mask"] = torch.stack([_pad(torch.ones_like(row), longest, 0) for row in ids])  # [B, S]
    return batch


def _pad(row: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, length - len(row)), value=value)


def _continue(positions: Tensor, length: int) -> Tensor:
    # Padding must not look like one more document.
    extra = torch.arange(1, length - len(positions) + 1) + positions[-1]
    return torch.cat([positions, extra])

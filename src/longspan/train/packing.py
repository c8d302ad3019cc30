"""Lay pieces of documents into rows and rows into optimizer steps: pure, deterministic, the same on every process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from longspan.batch import IGNORE_INDEX
from longspan.train.data import Corpus, count_targets


@dataclass(frozen=True)
class Step:
    """What one optimizer step trains on.

    Args:
        micro_batches: this replica's full batches (every sequence-parallel rank of it gets the same).
        num_items: targets of the whole step, over all replicas and micro-batches.
        tokens: tokens of the whole step, each counted once, padding not at all.
        documents_tokens: lengths of all documents of the whole step.
    """

    micro_batches: list[dict[str, Tensor]]
    num_items: int
    tokens: int
    documents_tokens: list[int]


@dataclass(frozen=True)
class Recipe:
    """How rows become steps.

    Args:
        sequence_length: longest row, in tokens.
        packing: whether a row may hold several documents.
        shuffle: whether each epoch has its own order.
        rows: rows per micro-batch.
        accumulation: micro-batches per step and replica.
        replicas: data-parallel size.
        seed: of the orders.
    """

    sequence_length: int
    packing: bool = True
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


def pack(lengths: Sequence[int], order: Sequence[int], capacity: int) -> Iterator[list[int]]:
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


def _rows(lengths: Sequence[int], recipe: Recipe) -> Iterator[list[int]]:
    epoch = 0
    while True:
        order = list(range(len(lengths)))
        if recipe.shuffle:
            random.Random(f"{recipe.seed}/{epoch}").shuffle(order)
        if recipe.packing:
            yield from pack(lengths, order, recipe.sequence_length)
        else:
            yield from ([index] for index in order)
        epoch += 1


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

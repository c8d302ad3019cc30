"""Batches that show what can go wrong: one long document, padded rows, packed documents of awkward lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Document:
    """Tokens `start` to `stop` (excluded) of a row."""

    row: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Sample:
    """A full batch and what it consists of.

    Args:
        batch: what `handle.shard` is given.
        documents: without padding; none of them sees another.
        images: what documents have beside their tokens.
    """

    name: str
    batch: dict[str, Any]
    documents: tuple[Document, ...]
    images: Mapping[Document, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor:
        """Token ids [B, S]."""
        return self.batch["input_ids"]

    @property
    def targets(self) -> int:
        """Tokens that are predicted: labelled, and not the first of their document."""
        return sum(int((self.labels(d)[1:] != IGNORED).sum()) for d in self.documents)

    @property
    def largest_position(self) -> int:
        """Largest position id of the batch, padding included."""
        if "attention_mask" in self.batch:
            return self.ids.shape[1] - 1
        return max(len(document) for document in self.documents) - 1

    def labels(self, document: Document) -> Tensor:
        """Labels of a document, [tokens], not shifted."""
        return self.batch["labels"][document.row, document.start : document.stop]

    def changed(self, document: Document, vocabulary: int) -> tuple[dict[str, Any], int]:
        """Return the batch with one token of a document replaced, and the token's index in its row."""
        at = document.start + len(document) // 3
        ids = self.ids.clone()
        ids[document.row, at] = (ids[document.row, at] + 1 + vocabulary // 3) % vocabulary
        return {**self.batch, "input_ids": ids}, at

    def probed(self) -> list[Document]:
        """Return up to three documents of different places to change a token in."""
        long = [document for document in self.documents if len(document) > 1]
        chosen = dict.fromkeys((long[0], max(long, key=len), long[-1]))
        return list(chosen)


def samples(tokens: int, vocabulary: int, packed_only: bool) -> list[Sample]:
    """Make the batches of a check.

    Args:
        tokens: per row.
        packed_only: leave out the batches with one document per row, add rows of packed documents.
    """
    packed = _sample("packed", [_lengths(tokens)], tokens, vocabulary, borders="position_ids")
    if packed_only:
        mirrored = [_lengths(tokens), _lengths(tokens)[::-1]]
        return [packed, _sample("packed rows", mirrored, tokens, vocabulary, borders="cu_seqlens")]
    short = max(2, tokens - tokens // 4)
    return [
        _sample("document", [[tokens]], tokens, vocabulary),
        _sample("padded rows", [[tokens], [short]], tokens, vocabulary),
        packed,
    ]


def _lengths(tokens: int) -> list[int]:
    """Divide a row into documents: one token, a few, a long one over several ranks, and what is left."""
    wanted = [1, tokens // 11, tokens // 7, 2, tokens * 9 // 20, 1, tokens // 5]
    lengths: list[int] = []
    for length in wanted:
        if length and sum(lengths) + length < tokens:
            lengths.append(length)
    return [*lengths, tokens - sum(lengths)]


def _sample(
    name: str, rows: Sequence[Sequence[int]], tokens: int, vocabulary: int, borders: str | None = None
) -> Sample:
    generator = torch.Generator().manual_seed(len(name))
    ids = torch.randint(vocabulary, (len(rows), tokens), generator=generator)
    documents = tuple(
        Document(row, stop - length, stop)
        for row, lengths in enumerate(rows)
        for length, stop in zip(lengths, accumulate(lengths), strict=True)
    )
    labels = torch.full_like(ids, IGNORED)
    for i, d in enumerate(documents):
        prompt = len(d) // 4 if i % 3 == 0 else len(d) if i % 3 == 2 and len(documents) > 3 else 0
        labels[d.row, d.start + prompt : d.stop] = ids[d.row, d.start + prompt : d.stop]
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if borders == "position_ids":
        batch["position_ids"] = torch.cat([torch.arange(len(d)) for d in documents]).view(len(rows), tokens)
    elif borders == "cu_seqlens":
        batch["cu_seqlens"] = torch.tensor([0, *accumulate(len(d) for d in documents)])
    if any(sum(lengths) < tokens for lengths in rows):
        real = torch.tensor([sum(lengths) for lengths in rows])
        batch["attention_mask"] = (torch.arange(tokens) < real[:, None]).long()
    return Sample(name, batch, documents)

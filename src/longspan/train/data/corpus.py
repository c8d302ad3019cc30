"""A run's tokens: its documents cut to the sequence length, in memory once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.config import DataConfig
from longspan.errors import DataError
from longspan.integrations.encoding import Encoder
from longspan.train.data.readers import read_documents
from longspan.train.data.report import Problems, Report
from longspan.train.data.rows import Document, count_targets


@dataclass(frozen=True)
class Corpus:
    """Pieces of documents, none longer than the sequence length, each with at least one target.

    Args:
        tokens, labels: int32 [all tokens]; labels None means that every token is a target.
        starts: int64 [pieces + 1], where each piece starts.
    """

    tokens: Tensor
    labels: Tensor | None
    starts: Tensor

    @property
    def lengths_tokens(self) -> list[int]:
        """Length of each piece."""
        return self.starts.diff().tolist()

    def piece(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (input_ids, labels) of a piece, int64 [tokens] each."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        ids = self.tokens[start:end].long()
        return ids, ids if self.labels is None else self.labels[start:end].long()

    def save(self, path: str | Path) -> None:
        """Write the corpus for other processes to load."""
        tensors = {"tokens": self.tokens, "starts": self.starts}
        save_file(tensors if self.labels is None else {**tensors, "labels": self.labels}, path)

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """Map a saved corpus into memory."""
        tensors = load_file(path)
        return cls(tensors["tokens"], tensors.get("labels"), tensors["starts"])

    @classmethod
    def of(cls, pieces: Iterable[Document]) -> Corpus:
        """Join pieces as they come, so that besides the corpus one of them is held.

        Args:
            pieces: at least one.
        """
        tokens, starts = array("i"), array("q", [0])
        labels: array[int] | None = None
        for piece in pieces:
            if piece.labels is not None and labels is None:
                labels = array("i", tokens)
            tokens.frombytes(piece.input_ids.tobytes())
            if labels is not None:
                labels.frombytes((piece.input_ids if piece.labels is None else piece.labels).tobytes())
            starts.append(len(tokens))
        return cls(
            tokens=torch.frombuffer(tokens, dtype=torch.int32),
            labels=None if labels is None else torch.frombuffer(labels, dtype=torch.int32),
            starts=torch.frombuffer(starts, dtype=torch.int64),
        )


def read_corpus(data: DataConfig, sequence_length: int, encoder: Encoder) -> tuple[Corpus, Report]:
    """Read every document of a run and cut it to length.

    Args:
        sequence_length: longest piece, in tokens.

    Raises:
        DataError: files or rows that cannot be used, each by its name and line.
    """
    report = Report()
    problems = Problems(report, skip=data.bad_rows == "skip")
    found = _pieces(data, sequence_length, encoder, problems, report)
    first = next(found, None)
    corpus = None if first is None else Corpus.of(chain((first,), found))
    problems.finish()
    if corpus is None:
        raise DataError(f"data.files: nothing to train on ({report}).")
    return corpus, report


def _pieces(
    data: DataConfig, sequence_length: int, encoder: Encoder, problems: Problems, report: Report
) -> Iterator[Document]:
    for document in read_documents(data, encoder, problems):
        yield from cut(document, data, sequence_length, problems, report)


def cut(
    document: Document, data: DataConfig, sequence_length: int, problems: Problems, report: Report
) -> Iterator[Document]:
    """Yield the pieces of a document that are trained on, and count what becomes of it."""
    n = len(document.input_ids)
    report.documents += 1
    report.tokens += n
    if n == 0:
        if data.empty_documents == "error":
            problems.refuse(document.origin, "the document is empty; remove it or set data.empty_documents: drop")
        else:
            report.empty.add(document.origin)
        return
    if n > sequence_length and data.long_documents != "split":
        if data.long_documents == "error":
            problems.refuse(
                document.origin,
                f"{n:,} tokens exceed sequence_length {sequence_length:,}; raise it or set data.long_documents: split "
                "(or drop)",
            )
        else:
            report.long.add(document.origin, n)
        return
    if n > sequence_length:
        report.split.add(document.origin, n)
    for start in range(0, n, sequence_length):
        part = slice(start, start + sequence_length)
        labels = None if document.labels is None else document.labels[part]
        piece = Document(document.origin, document.input_ids[part], labels)
        if count_targets(piece.input_ids if labels is None else labels):
            report.pieces += 1
            report.piece_tokens += len(piece.input_ids)
            yield piece
        else:
            report.without_target.add(document.origin, len(piece.input_ids))

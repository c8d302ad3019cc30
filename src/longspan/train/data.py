"""Read documents from files, say precisely which cannot be used, and cut them to the run's sequence length."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longspan.batch import IGNORE_INDEX
from longspan.config import DataConfig
from longspan.errors import DataError

_SHOWN_PROBLEMS = 8
_LARGEST_ID = 2**31 - 1

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Document:
    """Tokens that see each other, where they came from, and optionally which of them are targets.

    Args:
        input_ids, labels: int32 [tokens]; labels None means that every token is a target.
    """

    origin: str
    input_ids: np.ndarray
    labels: np.ndarray | None = None


@dataclass
class Report:
    """Count what became of the documents."""

    documents: int = 0
    tokens: int = 0
    split_documents: int = 0
    long_documents_dropped: int = 0
    long_tokens_dropped: int = 0
    empty_documents_dropped: int = 0
    pieces_without_target_dropped: int = 0
    pieces: int = 0
    piece_tokens: int = 0

    def __str__(self) -> str:
        text = f"{self.documents:,} documents, {self.tokens:,} tokens"
        if self.split_documents:
            text += f"; {self.split_documents:,} cut, {self.pieces:,} pieces in all"
        if self.long_documents_dropped:
            text += f"; {self.long_documents_dropped:,} too long and left out ({self.long_tokens_dropped:,} tokens)"
        if self.empty_documents_dropped:
            text += f"; {self.empty_documents_dropped:,} empty and left out"
        if self.pieces_without_target_dropped:
            text += f"; {self.pieces_without_target_dropped:,} pieces without a target left out"
        return text


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


def read_corpus(data: DataConfig, sequence_length: int, encode: Encode) -> tuple[Corpus, Report]:
    """Read every document of a run and cut it to length.

    Args:
        sequence_length: longest piece, in tokens.
        encode: turns text into token ids.

    Raises:
        DataError: files or rows that cannot be used, each by its name and line.
    """
    report = Report()
    pieces: list[Document] = []
    problems = _Problems()
    for document in _documents(_of_format(expand_files(data.files), data.format), data.format, encode, problems):
        report.documents += 1
        report.tokens += len(document.input_ids)
        pieces += _pieces(document, data, sequence_length, report, problems)
    problems.finish()
    if not pieces:
        raise DataError(f"data.files: nothing to train on ({report}).")
    report.pieces = len(pieces)
    report.piece_tokens = sum(len(piece.input_ids) for piece in pieces)
    lengths = [0, *(len(piece.input_ids) for piece in pieces)]
    labels = None
    if any(piece.labels is not None for piece in pieces):
        labels = np.concatenate([piece.input_ids if piece.labels is None else piece.labels for piece in pieces])
    return (
        Corpus(
            tokens=torch.from_numpy(np.concatenate([piece.input_ids for piece in pieces])),
            labels=None if labels is None else torch.from_numpy(labels),
            starts=torch.from_numpy(np.cumsum(lengths, dtype=np.int64)),
        ),
        report,
    )


def _of_format(files: Sequence[Path], kind: str) -> Sequence[Path]:
    """Return the files, unless their names say that they are of another format than text."""
    named = {".jsonl": "jsonl", ".npy": "tokens"}
    for file in files:
        if kind == "text" and file.suffix in named:
            raise DataError(
                f"{file} would be read as text, as one document. Set data.format: {named[file.suffix]}, or rename it."
            )
    return files


def expand_files(patterns: Sequence[str]) -> list[Path]:
    """List the files that names and patterns mean, sorted per pattern, each once.

    Raises:
        DataError: a name or pattern that means no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        names = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            raise DataError(f"data.files: {pattern} matches no file (read from {Path.cwd()}).")
        found.update(dict.fromkeys(files))
    return list(found)


class _Problems:
    """Gather problems with rows, so that a user sees several at once; stop early on a hopeless file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)
        if len(self.lines) == _SHOWN_PROBLEMS:
            raise DataError("\n  ".join(["Data cannot be used; the first problems:", *self.lines]))

    def finish(self) -> None:
        if len(self.lines) == 1:
            raise DataError(self.lines[0])
        if self.lines:
            raise DataError("\n  ".join([f"Data cannot be used, {len(self.lines)} problems:", *self.lines]))


def _pieces(
    document: Document, data: DataConfig, sequence_length: int, report: Report, problems: _Problems
) -> Iterator[Document]:
    n = len(document.input_ids)
    if n == 0:
        if data.empty_documents == "error":
            problems.add(f"{document.origin}: the document is empty; remove it or set data.empty_documents: drop.")
        report.empty_documents_dropped += 1
        return
    if n > sequence_length and data.long_documents != "split":
        if data.long_documents == "error":
            problems.add(
                f"{document.origin}: {n:,} tokens exceed sequence_length {sequence_length:,}; "
                "raise it or set data.long_documents: split (or drop)."
            )
        report.long_documents_dropped += 1
        report.long_tokens_dropped += n
        return
    report.split_documents += n > sequence_length
    for start in range(0, n, sequence_length):
        part = slice(start, start + sequence_length)
        labels = None if document.labels is None else document.labels[part]
        piece = Document(document.origin, document.input_ids[part], labels)
        if count_targets(piece.input_ids if labels is None else labels):
            yield piece
        else:
            report.pieces_without_target_dropped += 1


def count_targets(labels: Any) -> int:
    """Count the targets of one document: its first token is nobody's."""
    return int((labels[1:] != IGNORE_INDEX).sum())


def _documents(files: Sequence[Path], kind: str, encode: Encode, problems: _Problems) -> Iterator[Document]:
    for path in files:
        try:
            if kind == "jsonl":
                yield from _jsonl(path, encode, problems)
            elif kind == "tokens":
                yield Document(str(path), _ids(np.load(path, mmap_mode="r", allow_pickle=False)))
            else:
                yield Document(str(path), _ids(encode(path.read_bytes().decode("utf-8"))))
        except UnicodeDecodeError as error:
            problems.add(f"{path}: not UTF-8 text (byte {error.start:,}).")
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            problems.add(f"{path}: {str(error).rstrip('.')}.")


def _jsonl(path: Path, encode: Encode, problems: _Problems) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _row(f"{path}:{number}", line, encode)
            except json.JSONDecodeError as error:
                problems.add(f"{path}:{number}: not JSON ({error.msg} at column {error.colno}).")
            except UnicodeDecodeError:
                problems.add(f"{path}:{number}: not UTF-8 text.")
            except (ValueError, RecursionError) as error:
                problems.add(f"{path}:{number}: {str(error).rstrip('.')}.")


def _row(origin: str, line: bytes, encode: Encode) -> Document:
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict) or ("text" in row) == ("input_ids" in row):
        raise ValueError("a row must be an object with either `text` or `input_ids`")
    labels = row.get("labels")
    if "text" in row:
        if not isinstance(row["text"], str):
            raise ValueError(f"`text` must be a string, got {type(row['text']).__name__}")
        if labels is not None:
            raise ValueError("`labels` need `input_ids`; they cannot be aligned with `text`")
        return Document(origin, _ids(encode(row["text"])))
    ids = _ids(row["input_ids"])
    if labels is None:
        return Document(origin, ids)
    targets = _ids(labels, lowest=IGNORE_INDEX)
    if len(targets) != len(ids):
        raise ValueError(f"{len(targets)} `labels` for {len(ids)} `input_ids`")
    if ((targets < 0) & (targets != IGNORE_INDEX)).any():
        raise ValueError(f"`labels` must be token ids, or {IGNORE_INDEX} for no target")
    return Document(origin, ids, targets)


def _ids(values: Any, lowest: int = 0) -> np.ndarray:
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise ValueError(f"token ids must be a list of whole numbers, got {type(values).__name__}")
    array = np.asarray(values) if len(values) else np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat list of whole numbers, got {array.ndim}-D {array.dtype}")
    if len(array) and (array.min() < lowest or array.max() > _LARGEST_ID):
        raise ValueError(f"token ids must lie from {lowest} to {_LARGEST_ID}, got {array.min()} to {array.max()}")
    return array.astype(np.int32)

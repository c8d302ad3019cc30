"""Read documents from files of each format, and note which rows cannot be used."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from longspan.config import DataConfig
from longspan.errors import DataError, LongspanError
from longspan.integrations.encoding import Encoder
from longspan.train.data import tables
from longspan.train.data.report import Problems
from longspan.train.data.rows import Document, document, ids, parse_json

_BOM = b"\xef\xbb\xbf"
_ROWS_OF = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npy": "tokens"}


def read_documents(data: DataConfig, encoder: Encoder, problems: Problems) -> Iterator[Document]:
    """Read a run's documents one by one.

    Raises:
        DataError: files that are missing or cannot be read at all, or more problems than are worth listing.
    """
    return islice(_documents(data, encoder, problems), data.max_documents)


def expand_files(patterns: Sequence[str], setting: str = "data.files") -> list[Path]:
    """List the files that names and patterns mean, sorted per pattern, each once.

    Args:
        setting: what the user calls the patterns.

    Raises:
        DataError: a name or pattern that means no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        files = [Path(name) for name in _expand([pattern], setting) if Path(name).is_file()]
        if not files:
            raise _no_file(setting, pattern)
        found.update(dict.fromkeys(files))
    return list(found)


def _expand(patterns: Sequence[str], setting: str = "data.files") -> Iterator[str]:
    for pattern in patterns:
        if not glob.has_magic(pattern):
            yield pattern
            continue
        names = sorted(glob.glob(pattern, recursive=True))
        if not names:
            raise _no_file(setting, pattern)
        yield from names


def _no_file(setting: str, pattern: str) -> DataError:
    return DataError(f"{setting}: {pattern} matches no file (read from {Path.cwd()}).")


def _documents(data: DataConfig, encoder: Encoder, problems: Problems) -> Iterator[Document]:
    if data.format == "dataset":
        for name in _expand(data.files):
            found = tables.dataset(name, data.subset, data.split, data.streaming)
            yield from _table_rows(name, found, encoder, data.form, problems)
        return
    for path in expand_files(data.files):
        try:
            if data.format == "jsonl":
                yield from _jsonl(path, encoder, data.form, problems)
            elif data.format == "parquet":
                yield from _table_rows(str(path), tables.parquet(path), encoder, data.form, problems)
            elif data.format == "tokens":
                yield from _file(path, encoder, problems, tokens=True)
            else:
                _check_text(path)
                yield from _file(path, encoder, problems, tokens=False)
        except OSError as error:
            problems.refuse(str(path), error.strerror or str(error))


def _check_text(path: Path) -> None:
    if path.suffix in _ROWS_OF:
        raise DataError(
            f"{path} would be read as text, as one document. Set data.format: {_ROWS_OF[path.suffix]}, or rename it."
        )


def _file(path: Path, encoder: Encoder, problems: Problems, tokens: bool) -> Iterator[Document]:
    """Read a file that is one document."""
    try:
        if tokens:
            yield Document(str(path), ids(np.load(path, mmap_mode="r", allow_pickle=False)))
        else:
            text = path.read_bytes().decode("utf-8")
            yield Document(str(path), ids(encoder.text(text) if text else []))
    except UnicodeDecodeError as error:
        problems.row(str(path), f"not UTF-8 text (byte {error.start:,})")
    except (EOFError, ValueError) as error:
        problems.row(str(path), str(error))


def _jsonl(path: Path, encoder: Encoder, form: str, problems: Problems) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            try:
                yield document(origin, parse_json(line.decode("utf-8")), encoder, form)
            except LongspanError:
                raise
            except json.JSONDecodeError as error:
                problems.row(origin, f"not JSON ({error.msg} at column {error.colno})")
            except UnicodeDecodeError:
                problems.row(origin, "not UTF-8 text")
            except RecursionError:
                problems.row(origin, "nested too deeply")
            except ValueError as error:
                problems.row(origin, str(error))


def _table_rows(
    name: str, found: Iterator[tables.Table], encoder: Encoder, form: str, problems: Problems
) -> Iterator[Document]:
    number = 0
    for table in found:
        for index in range(table.num_rows):
            origin = f"{name}[{number}]"
            number += 1
            try:
                yield document(origin, tables.row(table, index), encoder, form)
            except LongspanError:
                raise
            except RecursionError:
                problems.row(origin, "nested too deeply")
            except (ValueError, OverflowError) as error:
                problems.row(origin, str(error))

"""Read rows of Arrow tables, from parquet files and from whatever the `datasets` library reads as data alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspan.errors import DataError
from longspan.train.data.rows import FIELDS, PACKED_FIELDS

Table = Any
"""pyarrow's Table or RecordBatch; the library is an extra."""

_BATCH_ROWS = 64
"""Rows read at a time: a row may be a book."""

_DATASETS = 4
"""The first version of `datasets` that runs no scripts of data sets."""

_FIELDS = frozenset((*FIELDS, *PACKED_FIELDS))
_IDS = frozenset(("input_ids", "labels", *PACKED_FIELDS))
_LOADERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_PLAIN = frozenset((*_LOADERS.values(), "cache"))
"""Loaders that read data and nothing that could be code."""


def parquet(path: Path) -> Iterator[Table]:
    """Read a parquet file, a few rows at a time.

    Raises:
        DataError: it is not one, or pyarrow is missing.
    """
    library = _library("pyarrow.parquet", "parquet")
    with _reading(str(path), _library("pyarrow", "parquet").ArrowException), library.ParquetFile(path) as file:
        names = _columns(str(path), file.schema_arrow.names)
        yield from file.iter_batches(batch_size=_BATCH_ROWS, columns=names)


def dataset(name: str, subset: str | None, split: str, streaming: bool) -> Iterator[Table]:
    """Read what `save_to_disk` wrote into a folder, or a data file, a folder or a hub id by its loader.

    Args:
        streaming: read the sources themselves, instead of first writing them to the library's cache.

    Raises:
        DataError: there is no such data or split, it would be read by more than plain data's loaders, or a library is
            missing.
    """
    library = _library("datasets", "dataset")
    if int(library.__version__.split(".")[0]) < _DATASETS:
        raise DataError(f"data.format dataset needs datasets {_DATASETS} or newer, found {library.__version__}.")
    arrow, own = _library("pyarrow", "dataset").ArrowException, library.exceptions.DatasetsError
    with _reading(name, arrow, own, RuntimeError):  # what it raises at scripts
        found = _open(library, name, subset, split, streaming)
        _columns(name, found.column_names or list(_FIELDS))
        yield from found.with_format("arrow").iter(batch_size=_BATCH_ROWS)


def row(table: Table, index: int) -> dict[str, Any]:
    """Return a row's known fields as Python has them; token ids as arrays.

    Raises:
        ValueError: a value has no counterpart.
    """
    found = {}
    for name in table.schema.names:
        if name in _FIELDS:
            scalar = table.column(name)[index]
            if scalar.is_valid:
                found[name] = _token_ids(scalar) if name in _IDS else _without_nulls(scalar.as_py())
    return found


def _token_ids(scalar: Any) -> Any:
    kind = str(getattr(scalar.type, "value_type", ""))
    if hasattr(scalar, "values") and kind.removeprefix("u").startswith("int"):
        return scalar.values.to_numpy(zero_copy_only=False)  # floats where there are nulls
    return scalar.as_py()


def _without_nulls(value: Any) -> Any:
    """Leave out fields of objects that are null: a table gives each object all fields of all of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _columns(name: str, names: list[str]) -> list[str]:
    known = [column for column in names if column in _FIELDS]
    if not known:
        raise DataError(
            f"{name} has the columns {', '.join(map(ascii, names))}; rows need `text`, `input_ids`, `prompt` and "
            "`completion`, or `messages`. Rename its columns."
        )
    return known


def _open(library: Any, name: str, subset: str | None, split: str, streaming: bool) -> Any:
    folder = Path(name)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        found = library.load_from_disk(name)
        if not isinstance(found, library.DatasetDict):
            return found  # it has no splits
        if split not in found:
            raise DataError(f"{name} has no split {split!r}: set data.split to one of {', '.join(found)}.")
        return found[split]
    if folder.is_file():
        if folder.suffix not in _LOADERS:
            raise DataError(f"{name}: data.format dataset reads {', '.join(_LOADERS)}, not {folder.suffix or 'this'}.")
        options = {"sep": "\t"} if folder.suffix == ".tsv" else {}
        builder = library.load_dataset_builder(_LOADERS[folder.suffix], data_files=[name], **options)
    else:
        builder = library.load_dataset_builder(name, subset)
    loader = type(builder).__module__.rsplit(".", 1)[-1]
    if loader not in _PLAIN:
        raise DataError(
            f"{name} would be read by datasets' loader {loader!r}; only {', '.join(sorted(_PLAIN))} are taken. Save "
            "its rows as parquet."
        )
    if streaming:
        return builder.as_streaming_dataset(split=split)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _library(name: str, kind: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(
            f"data.format {kind} needs {name.split('.')[0]}, which is not installed: pip install 'longspan[data]'. "
            "Without it, jsonl, text and tokens can be read."
        ) from None


@contextmanager
def _reading(name: str, *errors: type[Exception]) -> Iterator[None]:
    """Name the data that a library cannot read."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, KeyError, *errors) as error:
        reason = str(error.__cause__ or error).strip().rstrip(".")
        raise DataError(f"{name} cannot be read: {reason}.") from None

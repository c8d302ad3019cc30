"""Parquet files and datasets give the documents that JSONL gives, and errors that name the row."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import longspan.train.data
from longspan.config import DataConfig
from longspan.errors import DataError
from longspan.integrations.encoding import Encoder
from longspan.integrations.tokenizer import byte_tokenizer
from longspan.train.data import Corpus, Report, read_corpus
from test_encoding import CHATML

pa = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")
parquet = pytest.importorskip("pyarrow.parquet")

CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
OTHER = {"function": {"name": "say", "arguments": {"b": "x"}}}
ROWS: list[dict[str, Any]] = [
    {"text": "hello", "id": 7},
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"prompt": "a", "completion": "b"},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    {
        "messages": [{"role": "user", "content": "z"}, {"role": "assistant", "tool_calls": [CALL, OTHER]}],
        "tools": [CALL],
    },
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def encoder() -> Encoder:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    return Encoder(tokenizer)


def read(files: Path | str | list[str], kind: str, **options: Any) -> tuple[Corpus, Report]:
    names = files if isinstance(files, list) else str(files)
    data = DataConfig.model_validate({"files": names, "format": kind, **options})
    return read_corpus(data, 1000, encoder())


def documents(corpus: Corpus) -> list[Any]:
    return [[t.tolist() for t in corpus.piece(i)] for i in range(len(corpus.lengths_tokens))]


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def test_parquet_is_read_as_jsonl_is(tmp_path: Path) -> None:
    expected = documents(read(jsonl(tmp_path, ROWS), "jsonl")[0])
    assert len(expected) == 5
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    # A table has the fields of all rows in each; those that are null are not there.
    columns = pa.schema([pa.field(name, pa.Table.from_pylist(ROWS[1:]).schema.field(name).type) for name in ROWS[1]])
    assert columns.names == ["input_ids", "labels"]
    table = pa.Table.from_pylist([{**dict.fromkeys(sorted({n for r in ROWS for n in r})), **row} for row in ROWS])
    parquet.write_table(table, tmp_path / "b.parquet")
    assert documents(read(tmp_path / "b.parquet", "parquet")[0]) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_are_read_as_jsonl_is(tmp_path: Path, streaming: bool) -> None:
    expected = documents(read(jsonl(tmp_path, ROWS), "jsonl")[0])
    folder = tmp_path / "folder"
    folder.mkdir()
    by_form = [ROWS[:1], ROWS[1:2], ROWS[2:3], ROWS[3:]]
    files = [str(jsonl(folder, rows, f"{number}.jsonl")) for number, rows in enumerate(by_form)]
    assert documents(read(files, "dataset", streaming=streaming)[0]) == expected
    pairs = [{"text": "a"}, {"text": "bc"}]
    one = datasets.Dataset.from_list(pairs)
    one.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.csv").write_text("text,n\na,1\nbc,2\n")
    plain = documents(read(jsonl(tmp_path, pairs, "pairs.jsonl"), "jsonl")[0])
    for name in ("saved", "splits", "texts", "texts/a.csv", "texts/*.csv"):
        assert documents(read(tmp_path / name, "dataset", streaming=streaming)[0]) == plain
    assert documents(read(tmp_path / "splits", "dataset", split="test", streaming=streaming)[0]) == plain[1:]


def test_token_arrays_of_every_whole_type(tmp_path: Path) -> None:
    for kind in (pa.int32(), pa.uint16(), pa.int64(), pa.uint64()):
        for listed in (pa.list_(kind), pa.large_list(kind), pa.list_(kind, 3)):
            parquet.write_table(pa.table({"input_ids": pa.array([[1, 2, 3]], listed)}), tmp_path / "a.parquet")
            assert documents(read(tmp_path / "a.parquet", "parquet")[0]) == [[[1, 2, 3], [1, 2, 3]]]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"text": pa.array(["ok", None])}, "this one has nothing"),
        ({"text": pa.array([1, 2])}, "`text` must be a string, got int"),
        ({"text": pa.array([b"a", b"b"])}, "`text` must be a string, got bytes"),
        ({"input_ids": pa.array([[1, 2], [1, None]])}, "whole numbers, got 1-D float64"),
        ({"input_ids": pa.array([[1.5], [2.5]])}, "whole numbers, got float"),
        ({"input_ids": pa.array([[1, 2], [1, 2**31]])}, "from 0 to 2147483647"),
        ({"input_ids": pa.array([[[1]], [[2]]])}, "a flat list"),
        ({"input_ids": pa.array([True, False])}, "a list of whole numbers, got bool"),
        ({"messages": pa.array(["ok", "{"])}, "`messages` must be a list of objects"),
        ({"messages": pa.array([[{"role": "user", "content": "a"}], []])}, "holds no message"),
        ({"messages": pa.array([[{"role": None, "content": "a"}]] * 2)}, "must have a `role`"),
    ],
)
def test_bad_rows_are_named_by_their_index(tmp_path: Path, column: dict[str, Any], said: str) -> None:
    parquet.write_table(pa.table(column), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.parquet", "parquet")
    assert said in str(caught.value)
    assert f"{tmp_path / 'a.parquet'}[1]: " in str(caught.value)


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        read(tmp_path / "a.parquet", "parquet")
    parquet.write_table(pa.table({"story": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"has the columns 'story'.*Rename"):
        read(tmp_path / "b.parquet", "parquet")
    with pytest.raises(DataError, match="cannot be read"):
        read(str(tmp_path / "none"), "dataset")
    (tmp_path / "a.pkl").write_bytes(b"x")
    with pytest.raises(DataError, match=r"reads \.csv.*not \.pkl"):
        read(tmp_path / "a.pkl", "dataset")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{')
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"bad\.jsonl cannot be read: .*JSON"):
            read(tmp_path / "bad.jsonl", "dataset", streaming=streaming)
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match="no split 'test': set data.split to one of train"):
        read(tmp_path / "splits", "dataset", split="test")


def test_loaders_of_more_than_plain_data_are_refused(tmp_path: Path) -> None:
    for name in ("a.pkl", "b.pickle", "c.tar"):
        (tmp_path / name[0]).mkdir()
        (tmp_path / name[0] / name).write_bytes(b"x")
        with pytest.raises(DataError, match=r"loader|cannot be read"):
            read(tmp_path / name[0], "dataset")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(DataError, match="script"):
        read(tmp_path / "script", "dataset")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("kind", "missing"), [("parquet", "pyarrow"), ("dataset", "datasets")])
def test_missing_libraries_are_named_with_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, missing: str
) -> None:
    parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    for name in (missing, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=rf"needs {missing}, which is not installed: pip install 'longspan\[data\]'"):
        read(tmp_path / "a.parquet", kind)
    assert documents(read(jsonl(tmp_path, ROWS[:1]), "jsonl")[0])


def test_bad_rows_are_skipped_and_documents_limited(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["a", None, "b", "c"]}), tmp_path / "a.parquet")
    corpus, report = read(tmp_path / "a.parquet", "parquet", bad_rows="skip")
    assert len(documents(corpus)) == 3
    assert sum(tally.count for tally in report.skipped.values()) == 1
    assert "1 skipped, such as" in str(report)
    assert "a.parquet[1]: a row must have" in str(report)
    assert len(documents(read(tmp_path / "a.parquet", "parquet", bad_rows="skip", max_documents=2)[0])) == 2


def test_libraries_are_imported_where_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in Path(longspan.train.data.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            assert not isinstance(node, ast.Import | ast.ImportFrom) or not re.search(
                "datasets|pyarrow", ast.unparse(node)
            )
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(DataError, match=r"needs datasets 4 or newer, found 3\.6\.0"):
        read(str(tmp_path), "dataset")

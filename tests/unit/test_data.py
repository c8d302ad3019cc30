"""Documents from files: what is read, cut, left out, counted and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from longspan.config import DataConfig
from longspan.errors import DataError
from longspan.integrations.encoding import Encoder
from longspan.integrations.tokenizer import byte_tokenizer
from longspan.train.data import Corpus, Report, read_corpus


def encode(text: str) -> list[int]:
    return list(text.encode())


class Bytes(Encoder):
    """Encodes texts without an end, so that they count what they show."""

    def text(self, text: str) -> list[int]:
        return encode(text)


BYTES = Bytes(byte_tokenizer())


def read(files: Any, length: int = 100, **options: Any) -> tuple[Corpus, Report]:
    names = [str(file) for file in files] if isinstance(files, list) else str(files)
    return read_corpus(DataConfig.model_validate({"files": names, **options}), length, BYTES)


def pieces(corpus: Corpus) -> list[list[int]]:
    return [corpus.piece(i)[0].tolist() for i in range(len(corpus.lengths_tokens))]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_text_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_bytes(f"{name}\r\n".encode())
    (tmp_path / "c.md").write_text("no")
    corpus, report = read(tmp_path / "*.txt")
    assert pieces(corpus) == [encode("a.txt\r\n"), encode("b.txt\r\n")]
    assert (report.documents, report.tokens, report.pieces) == (2, 14, 2)


def test_a_file_counts_once(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "hello")
    assert len(pieces(read([file, tmp_path / "*.txt"])[0])) == 1


def test_jsonl_rows(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"text": "hi there"},
        "",
        {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]},
        {"input_ids": [4, 5]},
    )
    corpus, report = read(file, format="jsonl")
    assert pieces(corpus) == [encode("hi there"), [1, 2, 3], [4, 5]]
    assert [corpus.piece(i)[1].tolist() for i in (1, 2)] == [[-100, -100, 3], [4, 5]]
    assert report.documents == 3


def test_token_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    assert pieces(read(tmp_path / "a.npy", format="tokens")[0]) == [[0, 1, 2, 3, 4]]


def test_pickled_tokens_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a\.npy"):
        read(tmp_path / "a.npy", format="tokens")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "a row must"),
        ({"txt": "x"}, "this one has 'txt'"),
        ({"text": "x", "input_ids": [1]}, "has `text` and `input_ids`; choose by data.form"),
        ({"text": 3}, "`text` must be a string, got int"),
        ({"text": "x", "labels": [1]}, "`labels` need `input_ids`"),
        ({"input_ids": [1, 2], "labels": [1]}, "1 `labels` for 2 `input_ids`"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "-100 for no target"),
        ({"input_ids": "12"}, "list of whole numbers"),
        ({"input_ids": 3}, "list of whole numbers"),
        ({"input_ids": [1.5, 2]}, "whole numbers"),
        ({"input_ids": [1, None]}, "whole numbers"),
        ({"input_ids": [[1, 2]]}, "flat list"),
        ({"input_ids": [1, -2]}, "from 0"),
        ({"input_ids": [1, 2**40]}, "from 0"),
        ({"input_ids": [1, 2**80]}, "whole numbers"),
        ({"input_ids": []}, "the document is empty"),
        ({"text": ""}, "the document is empty"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, row: Any, said: str) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "fine"}, row)
    with pytest.raises(DataError) as caught:
        read(file, format="jsonl")
    assert str(caught.value).startswith(f"{file}:2: ")
    assert said in str(caught.value)


def test_several_bad_rows_at_once_but_not_thousands(tmp_path: Path) -> None:
    few = write(tmp_path / "few.jsonl", "{", {"text": 1})
    with pytest.raises(DataError, match="2 problems") as caught:
        read(few, format="jsonl")
    assert f"{few}:1" in str(caught.value)
    assert f"{few}:2" in str(caught.value)
    many = write(tmp_path / "many.jsonl", *["{"] * 5000)
    with pytest.raises(DataError, match="the first problems") as caught:
        read(many, format="jsonl")
    assert len(str(caught.value).splitlines()) == 9


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="matches no file"):
        read(tmp_path / "*.txt")
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 text \(byte 2\)"):
        read(tmp_path / "a.txt")


def test_empty_documents(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", ""), write(tmp_path / "b.txt", "text")]
    with pytest.raises(DataError, match=r"a\.txt: the document is empty.*empty_documents: drop"):
        read(files)
    corpus, report = read(files, empty_documents="drop")
    assert len(pieces(corpus)) == 1
    assert "a.txt) empty and left out" in str(report)
    with pytest.raises(DataError, match="nothing to train on"):
        read(files[:1], empty_documents="drop")


def test_long_documents(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", "abcdefghij"), write(tmp_path / "b.txt", "xyz")]
    with pytest.raises(DataError, match="10 tokens exceed sequence_length 4"):
        read(files, 4)
    corpus, report = read(files, 4, long_documents="split")
    assert pieces(corpus) == [encode(text) for text in ("abcd", "efgh", "ij", "xyz")]
    assert "a.txt) cut, 4 pieces in all" in str(report)
    corpus, report = read(files, 4, long_documents="drop")
    assert pieces(corpus) == [encode("xyz")]
    assert "a.txt) too long and left out (10 tokens)" in str(report)


def test_pieces_without_a_target_are_left_out_and_counted(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"input_ids": [1, 2, 3]},  # its last piece has one token, which is nobody's target
        {"input_ids": [7]},
        {"input_ids": [4, 5], "labels": [4, -100]},
    )
    corpus, report = read(file, 2, format="jsonl", long_documents="split")
    assert pieces(corpus) == [[1, 2]]
    assert report.without_target.count == 3
    assert report.pieces == 1
    assert report.piece_tokens == 2


def test_saved_corpus_is_the_same(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3], "labels": [1, -100, 3]}, {"input_ids": [4, 5]})
    corpus, _ = read(file, format="jsonl")
    corpus.save(tmp_path / "corpus")
    loaded = Corpus.load(tmp_path / "corpus")
    for index in range(2):
        assert [t.tolist() for t in loaded.piece(index)] == [t.tolist() for t in corpus.piece(index)]


@given(st.binary(max_size=60))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused_in_words(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a"
    file.write_bytes(content)
    for kind in ("text", "jsonl", "tokens"):
        try:
            assert read(file, format=kind)[0].starts[0] == 0
        except DataError as error:
            assert str(file) in str(error) or "nothing to train on" in str(error)


@pytest.mark.parametrize(("name", "kind"), [("a.jsonl", "jsonl"), ("a.npy", "tokens")])
def test_rows_and_arrays_are_not_read_as_text(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text('{"text": "hi there"}')
    with pytest.raises(DataError, match=f"Set data.format: {kind}"):
        read(tmp_path / name)

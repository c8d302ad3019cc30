"""Ten thousand rows, valid, mutated and garbage: each is read, or refused by our own validator in words."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest

import longspan.integrations.encoding
import longspan.train.data
from longspan.config import DataConfig
from longspan.errors import DataError
from longspan.integrations.encoding import Encoder
from longspan.integrations.tokenizer import byte_tokenizer
from longspan.train.data import Report, read_corpus
from longspan.train.data.readers import read_documents
from longspan.train.data.report import Problems
from test_encoding import CHATML, MARKED

JSONL_ROWS, PARQUET_ROWS = 9_400, 600
VALID = 0.3

Row = dict[str, Any]
WORDS = ["the", "fox", " ", "\n", "é", "😀", "{{", "<|im_end|>", "\u2028", "\x00", "\\", '"', "0", "ﬁ", "a\u0301"]


def text(draw: Random) -> str:
    return "".join(draw.choices(WORDS, k=draw.randint(1, 8))) + "."


def valid(draw: Random) -> Row:
    """Make a row that must be read."""
    ids = [draw.randint(0, 255) for _ in range(draw.randint(2, 9))]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": draw.choice([1, None, "y", [1.5]])}}}
    asked = [{"role": draw.choice(["user", "system"]), "content": text(draw)}]
    said = [{"role": "assistant", "content": text(draw)}]
    rows: list[Row] = [
        {"text": text(draw)},
        {"input_ids": ids},
        {"input_ids": ids, "labels": [-100, *ids[1:]]},
        {"prompt": text(draw), "completion": text(draw)},
        {"prompt": asked, "completion": said},
        {"messages": [*asked, *said] * draw.randint(1, 3)},
        {"messages": [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [call]},
    ]
    row = draw.choice(rows)
    return {**row, "meta": draw.choice([None, 3, {"a": []}])} if draw.random() < 0.3 else row


def deep(draw: Random) -> Any:
    found: Any = 0
    for _ in range(draw.choice([20, 300, 800])):
        found = [found] if draw.random() < 0.5 else {"content": found}
    return found


JUNK: list[Callable[[Random], Any]] = [
    lambda draw: None,
    lambda draw: draw.choice([True, False]),
    lambda draw: draw.choice([float("nan"), float("inf"), -0.0, 1e308, 0.5]),
    lambda draw: draw.choice([2**31, 2**63, 2**64, -(2**70), 10**400, -1, -101]),
    lambda draw: draw.choice(["", "\ud800", "\udfff.", "\x00", "[1]", '{"a": NaN}', '[{"role": "user"}]', "[" * 5000]),
    lambda draw: draw.choice([[], {}, [[]], [None], {"": None}, [[1], [2]], [1, "2"], [{}], {"role": "user"}]),
    lambda draw: [draw.choice([1, 2.0, None, True, "x", 2**64]) for _ in range(draw.randint(1, 4))],
    lambda draw: {draw.choice(["role", "content", "type", "\ud800", "text"]): draw.choice([1, None, "user", []])},
    deep,
]


def mutated(draw: Random, value: Any, junk: list[Callable[[Random], Any]] = JUNK) -> Any:
    """Change one place of a value, at any depth."""
    if draw.random() < 0.35 or not isinstance(value, dict | list) or not value:
        return draw.choice(junk)(draw)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [*value[:at], mutated(draw, value[at], junk), *value[at + 1 :]]
    name = draw.choice(list(value))
    rest = {key: item for key, item in value.items() if key != name}
    how = draw.random()
    if how < 0.15:
        return rest
    if how < 0.3:
        return {
            **value,
            draw.choice(["text", "labels", "messages", "prompt", "tools", "role"]): mutated(draw, None, junk),
        }
    return {**rest, name: mutated(draw, value[name], junk)}


def encoded(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b'{"messages": ' + b"[" * 990 + b"]" * 990 + b"}"


def line(draw: Random) -> tuple[bytes, bool]:
    """Make a line of a file, without its end, and say whether it must be read."""
    content, sound = _line(draw)
    return content.replace(b"\n", b"\r"), sound


def _line(draw: Random) -> tuple[bytes, bool]:
    kind = draw.random()
    row = valid(draw)
    if kind < VALID:
        whole = json.dumps(row, ensure_ascii=draw.random() < 0.5).encode()
        return draw.choice([b"", b" \t"]) + whole + draw.choice([b"", b"\r", b" \r\r"]), True
    if kind < 0.75:
        return encoded(mutated(draw, row)), False
    if kind < 0.9:
        content = bytearray(json.dumps(row).encode())
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(content))
            content[at : at + draw.randint(0, 2)] = draw.choice(
                [b"", b"\x00", b"\xff", b"\n", b"]", b'"', b"\xed\xa0\x80"]
            )
            content = content or bytearray(b"\r")
        return bytes(content[: draw.randint(1, len(content))]), False
    junk = draw.choice(JUNK)(draw)
    return draw.choice([draw.randbytes(draw.randint(0, 30)), encoded(junk), b"[" * 20_000]), False


def table(draw: Random) -> tuple[Any, bool]:
    """Make a table of one row, and say whether it must be read."""
    import pyarrow as pa

    row = valid(draw)
    if draw.random() < VALID:
        return pa.Table.from_pylist([row]), True
    if draw.random() < 0.4:
        try:
            return pa.Table.from_pylist([{"text": None, **mutated(draw, row, JUNK[:-1])}]), False
        except (pa.ArrowException, TypeError, OverflowError, UnicodeEncodeError):
            pass  # junk that no table can hold
    typed = [
        (datetime(2020, 1, 1), pa.timestamp("ns")),
        (2**62, pa.timestamp("us")),
        (2**62, pa.date64()),
        (date(2020, 1, 1), pa.date32()),
        (2**62, pa.duration("ns")),
        (Decimal("1.5"), pa.decimal128(5, 1)),
        (b"\xff\xfe", pa.binary()),
        (None, pa.null()),
        ([], pa.list_(pa.null())),
        ([1, None], pa.list_(pa.int16())),
        ([[1]], pa.list_(pa.list_(pa.int32()))),
        ([("a", 1)], pa.map_(pa.string(), pa.int8())),
        ({"role": "user", "content": None}, pa.struct({"role": pa.string(), "content": pa.string()})),
        ([{"role": "user", "content": 2**62}], pa.list_(pa.struct({"role": pa.string(), "content": pa.date64()}))),
        ([{"role": "assistant", "content": "x"}], None),
        ("x", pa.large_string()),
        ("x", pa.string_view()),
        ([1, 2], pa.list_view(pa.int32())),
        ([1.0, float("nan")], pa.list_(pa.float32())),
    ]
    names = draw.sample(["text", "input_ids", "labels", "prompt", "completion", "messages", "tools", "other"], 3)
    columns = {}
    for name in names[: draw.randint(1, 3)]:
        value, kind = draw.choice(typed)
        columns[name] = pa.array([value], kind)
        if draw.random() < 0.2 and isinstance(value, str):
            columns[name] = pa.Array.from_buffers(
                pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
            )
        if draw.random() < 0.1:
            columns[name] = columns[name].cast(kind) if kind == pa.null() else pa.array([None], kind)
    return pa.table(columns), False


def encoder(template: str) -> Encoder:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Encoder(tokenizer)


class Noted(Problems):
    """Takes down which rows were refused, and goes on."""

    def __init__(self) -> None:
        super().__init__(Report(), patient=True)
        self.origins: set[str] = set()

    def refuse(self, origin: str, reason: str) -> None:
        f"{origin}: {reason}".encode()  # what is printed must be printable
        self.origins.add(origin)


def fates(file: Path, kind: str, coded: Encoder) -> tuple[set[str], set[str]]:
    """Read a file; return the rows that are documents and those that were refused. Anything else ends the test."""
    problems = Noted()
    data = DataConfig.model_validate({"files": str(file), "format": kind})
    read = {document.origin for document in read_documents(data, coded, problems)}
    if problems.origins:
        with pytest.raises(DataError):
            read_corpus(data, 100_000, coded)
    return read, problems.origins


def test_lines_are_read_or_refused(tmp_path: Path) -> None:
    draw, file = Random(20261130), tmp_path / "a.jsonl"
    refused_rows = sound_rows = 0
    for template in (CHATML, MARKED) * 10:
        lines = [line(draw) for _ in range(JSONL_ROWS // 20)]
        file.write_bytes(b"\xef\xbb\xbf" * (template == MARKED) + b"\n".join(content for content, _ in lines))
        read, refused = fates(file, "jsonl", encoder(template))
        for number, (content, sound) in enumerate(lines, 1):
            origin = f"{file}:{number}"
            assert (origin in read) or not sound, f"is valid: {content}"
            assert (origin in read) ^ (origin in refused) or not content.strip(), content
            sound_rows += sound
        refused_rows += len(refused)
    assert min(sound_rows, refused_rows) > JSONL_ROWS / 5


def test_rows_of_tables_are_read_or_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    draw, file, coders = Random(20261130), tmp_path / "a.parquet", [encoder(CHATML), encoder(MARKED)]
    sound_rows = refused_rows = done = 0
    while done < PARQUET_ROWS:
        content, sound = table(draw)
        try:
            parquet.write_table(content, file, compression="none", write_statistics=False)
        except pa.ArrowNotImplementedError:
            continue  # types that no file can hold
        done += 1
        try:
            read, refused = fates(file, "parquet", coders[done % 2])
        except DataError as error:
            assert any(words in str(error) for words in ("has the columns", "too deeply nested"))
            read, refused = set(), {f"{file}[0]"}
        assert read or not sound, f"is valid: {content}"
        sound_rows += sound
        refused_rows += len(refused)
    assert min(sound_rows, refused_rows) > PARQUET_ROWS / 5


def test_readers_catch_only_what_they_name() -> None:
    """No `except Exception` makes the test above pass."""
    files = [
        *Path(longspan.train.data.__file__).parent.glob("*.py"),
        Path(longspan.integrations.encoding.__file__),
        Path(longspan.train.data.__file__).parents[2] / "integrations" / "tokenizer.py",
    ]
    handlers = [
        node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ExceptHandler)
    ]
    assert len(handlers) > 10
    for handler in handlers:
        assert handler.type is not None
        names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
        assert not names & {"Exception", "BaseException"}
    errors = longspan.integrations.encoding._TEMPLATE_ERRORS
    assert not {Exception, BaseException} & set(errors)

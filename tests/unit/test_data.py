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

from longspan.config import DataConfig, parse_config
from longspan.errors import DataError, LongspanError
from longspan.integrations.encoding import Encoder
from longspan.integrations.tokenizer import byte_tokenizer
from longspan.train.data import Corpus, Report, read_corpus
from longspan.train.preflight import preflight
from test_encoding import CHATML


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


def chat(*turns: Any, **rest: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **rest}


def read_chat(file: Path, **options: Any) -> tuple[Corpus, Report]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    data = DataConfig.model_validate({"files": str(file), "format": "jsonl", **options})
    return read_corpus(data, 1000, Encoder(tokenizer, data.targets))


def learnt(corpus: Corpus) -> list[str]:
    tokenizer = byte_tokenizer()
    found = [corpus.piece(i)[1] for i in range(len(corpus.lengths_tokens))]
    return [str(tokenizer.decode(labels[labels != -100])) for labels in found]


SAYS, CALLS = ("assistant", "y"), {"function": {"name": "add", "arguments": {"a": 1}}}


def test_rows_of_every_form(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALLS]}
    as_text = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    file = write(
        tmp_path / "a.jsonl",
        {"text": "t", "prompt": "an idea without a completion", "labels": None},
        {"prompt": "a", "completion": "b"},
        chat(("user", "x"), SAYS),
        {
            "prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "no"}],
            "completion": [{"role": "assistant", "content": "y"}],
        },
        {"messages": [{"role": "user", "content": "x"}, called]},
        {"messages": [{"role": "user", "content": "x"}, as_text], "tools": json.dumps([CALLS])},
        {"input_ids": [97, 98], "attention_mask": [1, 1], "position_ids": [0, 1]},
    )
    spoken, call = "y<|im_end|>\n", '[add {"a": 1}]<|im_end|>\n'
    end = "<|endoftext|>"
    assert learnt(read_chat(file)[0]) == ["t" + end, "b" + end, spoken, spoken, call, call, "ab"]
    everything = learnt(read_chat(file, targets="all")[0])
    assert everything[1:3] == ["ab" + end, "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n"]


def test_a_form_is_chosen_where_rows_have_several(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", chat(("user", "x"), SAYS, text="t"))
    with pytest.raises(DataError, match=r"has `text` and `messages`; choose by data\.form"):
        read_chat(file)
    assert learnt(read_chat(file, form="messages")[0]) == ["y<|im_end|>\n"]
    assert learnt(read_chat(file, form="text")[0]) == ["t<|endoftext|>"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a"}, "this one has 'prompt'"),
        ({"completion": "a"}, "this one has 'completion'"),
        ({"prompt": 1, "completion": "b"}, "`prompt` must be a string, got int"),
        ({"prompt": "a", "completion": "b", "tools": []}, "`tools` need messages"),
        ({"prompt": "a", "completion": "b", "labels": [1]}, "`labels` need `input_ids`"),
        ({"messages": "x"}, "text that is not JSON"),
        ({"messages": {}}, "must be a list of objects, got dict"),
        ({"messages": ["1"]}, "must be a list of objects, got int in it"),
        ({"messages": []}, "holds no message"),
        ({"messages": [{"content": "x"}]}, "message 1 of `messages` must have a `role`"),
        ({"messages": [{"role": "user"}]}, "must have `content` or `tool_calls`"),
        (chat(("user", 3)), "`content` of message 1 of `messages` must be a string, got int"),
        (chat(("user", [{"type": "image"}])), "has a part 'image'; parts must be text"),
        (chat(("user", ["x"])), "has a part 'str'"),
        (chat(("user", "\ud800")), "half of a surrogate pair"),
        ({"text": "\ud800"}, "half of a surrogate pair"),
        ('{"text": NaN}', "NaN is no JSON value"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "names no function"),
        (chat(("user", "x"), tools=[3]), "`tools` must be a list of objects, got int in it"),
        ({"messages": "[" * 100_000}, "nested too deeply"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "`attention_mask` says"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, "`position_ids` says"),
        ({"input_ids": [1, 2], "assistant_masks": [0, 1]}, "`assistant_masks` is not read"),
        ({"input_ids": [1, True]}, "got bool among them"),
        ({"\ud800": 1}, "this one has '\\ud800'"),
    ],
)
def test_bad_forms_are_named_by_file_and_line(tmp_path: Path, row: Any, said: str) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "fine"}, row)
    with pytest.raises(DataError) as caught:
        read_chat(file)
    assert str(caught.value).startswith(f"{file}:2: ")
    assert said in str(caught.value)
    corpus, report = read_chat(file, bad_rows="skip")
    assert learnt(corpus) == ["fine<|endoftext|>"]
    ((kind, tally),) = report.skipped.items()
    assert tally.count == 1 and tally.first[0].startswith(f"{file}:2: ") and kind
    str(report).encode()


def test_conversations_without_a_template_are_refused_once_even_where_bad_rows_are_skipped(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", *[chat(("user", "x"), SAYS)] * 9)
    with pytest.raises(DataError, match=r"a\.jsonl:1: conversations need a chat template.*data\.chat_template"):
        read(file, format="jsonl", bad_rows="skip")


def test_files_of_other_systems(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    _, report = read_chat(tmp_path / "a.jsonl")
    assert (report.documents, report.tokens) == (2, 4)


def test_skipped_rows_are_counted_by_reason(tmp_path: Path) -> None:
    rows = [{"text": "fine"}, *["{"] * 12, *[{"input_ids": [n, -n]} for n in range(1, 30)], {"text": 3}]
    file = write(tmp_path / "a.jsonl", *rows)
    _, report = read(file, format="jsonl", bad_rows="skip")
    assert [tally.count for tally in report.skipped.values()] == [12, 29, 1]
    assert "29 skipped, such as" in str(report)
    assert f"{file}:14: token ids must lie from 0 to 2147483647, got -1 to 1" in str(report)
    odd = [1.5, None, "x", {}, True, []]
    many = [{"input_ids": [item for bit, item in enumerate(odd) if number >> bit & 1]} for number in range(1, 64)]
    _, report = read(write(tmp_path / "b.jsonl", {"text": "fine"}, *many), format="jsonl", bad_rows="skip")
    assert sum(tally.count for tally in report.skipped.values()) == 63
    assert len(report.skipped) == 21
    assert report.skipped["other reasons"].count == 43


def test_bad_files_of_one_document_are_skipped_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "b.txt").write_bytes(b"abc")
    corpus, report = read(tmp_path / "*.txt", bad_rows="skip")
    assert pieces(corpus) == [encode("abc")]
    assert "not UTF-8 text (byte 2)" in str(report)


def test_documents_are_limited(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"text": "a b"}, {"text": "c d"}, "{")
    corpus, report = read(file, format="jsonl", max_documents=2)
    assert (len(pieces(corpus)), report.documents) == (2, 2)


def test_labels_join_where_only_some_documents_have_them(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 4], "labels": [-100, 4]}, {"input_ids": [5, 6]}]
    corpus, _ = read(write(tmp_path / "a.jsonl", *rows), format="jsonl")
    assert [corpus.piece(i)[1].tolist() for i in range(3)] == [[1, 2], [-100, 4], [5, 6]]


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


def test_targets_beyond_the_vocabulary_are_refused_before_training(tmp_path: Path) -> None:
    """On a GPU a kernel would stop at the step that reaches them, and name no row."""
    (tmp_path / "data.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [1, 2, 999999]}\n')
    values = {
        "model": {"name": "tiny-llama", "init": "random"},
        "data": {"files": [str(tmp_path / "data.jsonl")], "format": "jsonl"},
        "sequence_length": 64,
        "max_steps": 1,
        "output_dir": str(tmp_path / "out"),
    }
    with pytest.raises(LongspanError, match="999,?999"):
        preflight(parse_config(values), 1)

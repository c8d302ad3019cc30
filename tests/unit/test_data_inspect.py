"""`longspan data inspect`: what training would read, before it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longspan.cli import app
from longspan.config import DataConfig
from longspan.errors import ConfigError, DataError
from longspan.integrations.encoding import Encoder
from longspan.integrations.tokenizer import byte_tokenizer
from longspan.train.data import read_corpus
from longspan.train.packing import Recipe, epoch_rows

ROWS: list[Any] = [
    {"input_ids": [1, 2, 3, 4, 5, 6]},
    "{",
    {"input_ids": [1, 2, 3, 4, 5, 6, 7]},
    {"prompt": "a", "completion": "bc"},
    {"input_ids": list(range(23))},
    {"input_ids": [1, 2, 3]},
    {"input_ids": [9]},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in ROWS))
    return tmp_path / "a.jsonl"


def inspect(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", "inspect", *arguments])


def flags(file: Path, *more: str) -> list[str]:
    return ["--data-files", str(file), "--data-format", "jsonl", "--sequence-length", "10", *more]


TOLERANT = ("--data-bad-rows", "skip", "--data-long-documents", "split", "--seed", "3")


def test_it_says_what_training_reads(file: Path) -> None:
    done = inspect(*flags(file, *TOLERANT, "--json"))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    options = {"files": str(file), "format": "jsonl", "bad_rows": "skip", "long_documents": "split"}
    corpus, report = read_corpus(DataConfig.model_validate(options), 10, Encoder(byte_tokenizer()))
    assert {name: found[name] for name in report.to_json()} == report.to_json()
    labels = [corpus.piece(i)[1][1:] for i in range(len(corpus.lengths_tokens))]
    assert found["targets"] == sum(int((piece != -100).sum()) for piece in labels)
    assert found["targets_share"] == found["targets"] / sum(corpus.lengths_tokens)
    assert found["lengths"] == {"shortest": 1, "median": 4, "p90": 7, "longest": 23}
    assert [bar["documents"] for bar in found["histogram"]] == [1, 1, 3, 0, 1]
    assert [(bar["from_tokens"], bar["to_tokens"]) for bar in found["histogram"][:3]] == [(1, 1), (2, 3), (4, 7)]
    rows = epoch_rows(corpus.lengths_tokens, Recipe(10, seed=3), 0)
    assert found["rows_per_epoch"] == len(rows) == found["packing"][0]["rows"]
    assert found["packing"][0]["fill"] == sum(corpus.lengths_tokens) / (10 * len(rows))
    assert [packed["strategy"] for packed in found["packing"]] == ["best-fit", "in-order", "none"]
    assert found["split"] == {"count": 1, "tokens": 23, "first": [f"{file}:5"]}
    assert found["without_target"] == {"count": 1, "tokens": 1, "first": [f"{file}:7"]}


def test_it_speaks_to_people(file: Path) -> None:
    done = inspect(*flags(file, *TOLERANT))
    assert done.exit_code == 0, done.output
    for words in (
        "6 documents, 44 tokens",
        "longest 23 tokens",
        "4 to 7",
        "of them targets",
        "rows of 10 tokens, packing best-fit: 5 per epoch, 86.0% full",
        "otherwise, packing in-order",
        f"1 ({file}:5) cut, 7 pieces in all",
        f"1 ({file}:7) pieces without a target left out",
        f"{file}:2: not JSON",
    ):
        assert words in done.output
    assert "█" in done.output


def test_what_training_would_refuse_is_counted_and_the_exit_code_says_so(file: Path) -> None:
    done = inspect(*flags(file, "--json"))
    assert done.exit_code == 2
    assert "`longspan train` would refuse this data" in done.stderr
    found = json.loads(done.stdout)
    examples = [example for tally in found["refused"].values() for example in tally["first"]]
    assert [example.split(": ")[0] for example in examples] == [f"{file}:2", f"{file}:5"]
    assert "23 tokens exceed sequence_length 10" in examples[1]
    assert found["documents"] == 6
    (file.parent / "none.jsonl").write_text("\n")
    assert inspect(*flags(file.parent / "none.jsonl")).exit_code == 2


def test_it_takes_a_runs_file_and_looks_at_its_data_alone(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    data = {"files": str(file), "format": "jsonl", "bad_rows": "skip", "long_documents": "drop", "packing": False}
    run.write_text(json.dumps({"model": {"name": "no such"}, "data": data, "sequence_length": 8, "max_steps": "x"}))
    found = json.loads(inspect(str(run), "--json").stdout)
    assert found["rows_per_epoch"] == 4
    assert found["packing"][0]["strategy"] == "none"
    assert found["long"]["first"] == [f"{file}:5"]
    assert json.loads(inspect(str(run), "--json", "--sequence-length", "7", "--data-packing").stdout)["packing"][0] == {
        "strategy": "best-fit",
        "rows": 3,
        "fill": 20 / 21,
    }


def test_errors_are_those_of_train(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("sequence_lenght: 8\ndata: {file: x}\n")
    error = inspect(str(run)).exception
    assert isinstance(error, ConfigError)
    for words in ("sequence_lenght (", "Did you mean sequence_length?", "Did you mean data.files?"):
        assert words in str(error)
    error = inspect(*flags(tmp_path / "none.jsonl")).exception
    assert isinstance(error, DataError)
    assert "matches no file" in str(error)
    assert isinstance(inspect(*flags(file, "--data-streaming")).exception, ConfigError)

"""What the data settings say reaches training: one process, a tiny model, two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longspan.cli import app
from longspan.errors import ConfigError
from longspan.integrations.encoding import Encoder
from longspan.integrations.tokenizer import load_tokenizer
from longspan.train.packing import Recipe, epoch_rows
from test_encoding import CHATML

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 257}


def chat(number: int) -> dict[str, Any]:
    said = f"{number} " * (1 + number % 7)
    return {"messages": [{"role": "user", "content": "x" * number}, {"role": "assistant", "content": said}]}


ROWS = [chat(number) for number in range(1, 13)]


def train(folder: Path, name: str, *flags: str, **data: Any) -> list[dict[str, Any]]:
    """Run the command in this process and return its metrics."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "{")
    (folder / "chat.jinja").write_text(CHATML)
    settings = {"files": str(folder / "rows.jsonl"), "format": "jsonl", "chat_template": str(folder / "chat.jinja")}
    run = {
        "model": {"name": "tiny-llama", "init": "random", "overrides": SIZES},
        "data": {**settings, "bad_rows": "skip", **data},
        "sequence_length": 200,
        "engine": "single",
        "max_steps": 2,
        "save": {"every": 1},
        "output_dir": str(folder / name),
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    done = CliRunner().invoke(app, ["train", str(folder / "run.yaml"), "--nproc", "1", *flags])
    if done.exception is not None:
        raise done.exception
    assert "rows.jsonl:13: not JSON" in done.output
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_settings_reach_training(tmp_path: Path) -> None:
    best, in_order = train(tmp_path, "best"), train(tmp_path, "in-order", packing_strategy="in-order")
    coded = Encoder(load_tokenizer("bytes", str(tmp_path / "chat.jinja")))
    lengths = [len(coded.chat(row["messages"])[0]) for row in ROWS]
    for found, strategy in ((best, "best-fit"), (in_order, "in-order")):
        rows = epoch_rows(lengths, Recipe(200, strategy=strategy), 0)
        assert [row["tokens"] for row in found] == [sum(lengths[i] for i in row) for row in rows[:2]]
    assert [row["tokens"] for row in best] != [row["tokens"] for row in in_order]
    assert (tmp_path / "best" / "model" / "chat_template.jinja").read_text() == CHATML
    everything = train(tmp_path, "all", targets="all")
    assert [row["tokens"] for row in everything] == [row["tokens"] for row in best]
    assert everything[0]["loss"] != best[0]["loss"]
    with pytest.raises(ConfigError, match=r"data\.packing_strategy was best-fit, here it is in-order"):
        train(tmp_path, "best", "--resume", "--max-steps", "3", packing_strategy="in-order")

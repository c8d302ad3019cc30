"""What documents a run reads, how they become tokens, and how they share rows."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from longspan.config.section import Int, Section, Size, Texts
from longspan.config.section import field as _field


class DataConfig(Section):
    """The documents to train on."""

    files: Texts = _field(
        "Files or patterns (* ? **), from the working directory; ${stdlib} is Python's standard library. With format "
        "'dataset': folders, files or hub ids.",
        example='["data/*.jsonl"]',
        min_length=1,
    )
    format: Literal["text", "jsonl", "parquet", "dataset", "tokens"] = _field(
        "'text': a document per file. 'jsonl', 'parquet': a document per row (docs/data.md). 'dataset': the rows that "
        "`save_to_disk` wrote or `datasets.load_dataset` reads. 'tokens': a document per .npy file of whole numbers.",
        "text",
        example="jsonl",
    )
    form: Literal["auto", "text", "input_ids", "prompt", "messages"] = _field(
        "Which fields of a row are the document; 'auto': the one that a row has of `text`, `input_ids`, `prompt` with "
        "`completion`, and `messages`.",
        "auto",
        example="messages",
    )
    subset: str | None = _field(
        "With format 'dataset': the configuration to load; null: the only one.", None, example="en", min_length=1
    )
    split: str = _field("With format 'dataset': the split to load.", "train", example="train", min_length=1)
    streaming: bool = _field(
        "With format 'dataset': read it without writing a copy to the cache; its tokens are held all the same.",
        False,
        example=True,
    )
    max_documents: Int | None = _field(
        "Read no more than this many documents; null: all.", None, unit="documents", example=1000, ge=1
    )
    tokenizer: str = _field("Tokenizer: 'bytes', a folder, or a hub id.", "bytes", example="bytes", min_length=1)
    chat_template: str | None = _field(
        "File with the Jinja template that writes `messages`; it is saved with the model. null: the tokenizer's own.",
        None,
        example="chat.jinja",
        min_length=1,
    )
    targets: Literal["assistant", "all"] = _field(
        "What conversations, prompts and completions teach: 'assistant' what the assistant or the completion says; "
        "'all' every token.",
        "assistant",
        example="all",
    )
    bad_rows: Literal["error", "skip"] = _field(
        "Rows that cannot be read: refused, or left out, counted and reported.", "error", example="skip"
    )
    long_documents: Literal["split", "drop", "error"] = _field(
        "Documents longer than sequence_length: cut into pieces that do not see each other, left out, or refused.",
        "error",
        example="split",
    )
    empty_documents: Literal["drop", "error"] = _field(
        "Documents without a token: left out, or refused.", "error", example="drop"
    )
    packing: bool = _field(
        "Put several documents into a row, as many as fit; they never see each other.", True, example=True
    )
    packing_strategy: Literal["best-fit", "in-order"] = _field(
        "'best-fit': the longest documents first, each into the fullest row that has room, rows then shuffled; "
        "'in-order': documents as they come.",
        "best-fit",
        example="in-order",
    )
    shuffle: bool = _field("Draw a new order of the documents for each epoch, from the seed.", True, example=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.format != "dataset" and (self.subset is not None or self.split != "train" or self.streaming):
            raise ValueError(
                f"data.subset, data.split and data.streaming are for data.format: dataset, not {self.format}: leave "
                "them out, or set the format"
            )
        if self.format in ("text", "tokens") and self.form != "auto":
            raise ValueError(
                f"data.form {self.form} chooses among the fields of rows, which data.format: {self.format} has not: "
                "leave it out"
            )
        return self


class InspectConfig(Section):
    """What `longspan data inspect` looks at of a run's settings."""

    data: DataConfig
    sequence_length: Size = _field("Longest row.", unit="tokens", example="128K", ge=2)
    seed: Int = _field("Seed of the order.", 0, example=0, ge=0, lt=2**63)

"""The byte tokenizer: every byte is its own id, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import ConfigError
from longspan.integrations.tokenizer import EOS, byte_tokenizer, encode, load_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_ids_are_the_bytes(text: str) -> None:
    if EOS in text:
        return
    ids = encode(TOKENIZER, text)
    assert bytes(ids[:-1]) == text.encode() if text else ids == []
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_a_document_ends_with_its_end() -> None:
    assert encode(TOKENIZER, "a") == [97, 256]
    assert len(TOKENIZER) == 257


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    assert encode(load_tokenizer(str(tmp_path)), "né\n") == encode(TOKENIZER, "né\n")
    assert encode(load_tokenizer("bytes"), "né\n") == encode(TOKENIZER, "né\n")


def test_no_such_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer: cannot load"):
        load_tokenizer(str(tmp_path / "none"))

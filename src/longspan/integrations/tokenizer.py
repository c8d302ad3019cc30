"""Tokenizers: one byte per token, or a Hugging Face tokenizer by folder or hub id."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longspan.errors import ConfigError

EOS = "<|endoftext|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose ids 0 to 255 are the bytes of UTF-8 text and whose id 256 ends a document."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def load_tokenizer(name: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a run names.

    Args:
        chat_template: file with a template that takes the place of the tokenizer's own.

    Raises:
        ConfigError: there is none of that name, or it would need code from the model's folder; or no such template.
    """
    tokenizer = byte_tokenizer() if name == "bytes" else _named(name)
    if chat_template is not None:
        tokenizer.chat_template = _template(Path(chat_template))
    return tokenizer


def _named(name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"data.tokenizer: cannot load {name!r}: {reason} Give 'bytes', a folder with a tokenizer, or a hub id."
        ) from None


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template: cannot read {path}: {error}. Give a file with a template.") from None


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Turn a document into ids, closed by the tokenizer's end-of-text id where it has one."""
    ids: list[int] = tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    eos = tokenizer.eos_token_id
    if eos is not None and ids and ids[-1] != eos:
        ids.append(eos)  # pyright: ignore[reportArgumentType]
    return ids


def _byte_symbols() -> list[str]:
    # The byte-level pre-tokenizer writes printable bytes as themselves and moves the other 68 behind U+0100, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]

"""Text that needles are hidden in: its tokens, and where it may be cut."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longspan.config import expand_placeholders
from longspan.errors import DataError
from longspan.train.data.readers import expand_files

STDLIB = "${stdlib}/[a-z]*.py"
"""Python's standard library, which is everywhere."""

_LINE = re.compile(r"\n")
_SENTENCE = re.compile(r"[.!?][\"')\]]*(?=\s)")


@dataclass(frozen=True)
class Haystack:
    """Tokens of files, one after the other and round again, and the places between them where text may be cut.

    Args:
        ids: int64 [N].
        lines, sentences: sorted places at which one begins.
        whole: sorted places that part no character.
        files: how many were read; the rest was not needed.
    """

    ids: np.ndarray
    lines: np.ndarray
    sentences: np.ndarray
    whole: np.ndarray
    files: int

    @classmethod
    def read(cls, patterns: Sequence[str], tokenizer: Any, tokens: int) -> Haystack:
        """Read files until there are so many tokens, or no more files.

        Args:
            patterns: files or patterns of UTF-8 text; ${stdlib} is Python's standard library.
            tokenizer: a fast one says where its tokens stand in the text; with others text is cut at any token.

        Raises:
            DataError: a pattern that matches nothing, a file that is not text, or no text at all.
        """
        files = expand_files([expand_placeholders(pattern, "haystack") for pattern in patterns], "haystack")
        return cls.of((_text(file) for file in files), tokenizer, tokens)

    @classmethod
    def of(cls, texts: Iterable[str], tokenizer: Any, tokens: int) -> Haystack:
        """Take texts until there are so many tokens, or no more texts.

        Raises:
            DataError: there is no token.
        """
        found, count, used = [], 0, 0
        for text in texts:
            used += 1
            ids, *borders = _tokenised(text, tokenizer)
            if len(ids):
                found.append((ids, *(places + count for places in borders)))
                count += len(ids)
            if count >= tokens:
                break
        if not count:
            raise DataError(f"The haystack is empty: {used} file{'s' * (used != 1)} without a token.")
        return cls(*(np.concatenate(parts) for parts in zip(*found, strict=True)), files=used)

    def __len__(self) -> int:
        return len(self.ids)

    def start(self, draw: random.Random) -> int:
        """Draw a place to begin at: the start of a line, where there is one."""
        return int(draw.choice(self.lines)) if len(self.lines) else draw.randrange(len(self))

    def take(self, start: int, count: int) -> np.ndarray:
        """Return so many tokens from a place on, round again at the end."""
        return np.take(self.ids, np.arange(start, start + count), mode="wrap")

    def cut(self, place: int, most: int) -> tuple[int, str]:
        """Find where to cut near a place: at a line, else at a sentence, else between whole characters.

        Args:
            most: tokens that a line or a sentence may be away.

        Returns:
            How many tokens further on it is (back, if negative), and what begins there.
        """
        for name, places in (("line", self.lines), ("sentence", self.sentences)):
            moved = self._nearest(places, place)
            if moved is not None and abs(moved) <= most:
                return moved, name
        return self._nearest(self.whole, place) or 0, "token"

    def _nearest(self, places: np.ndarray, place: int) -> int | None:
        """Return how far the nearest of some places is, round the end; None if there is none."""
        if not len(places):
            return None
        count, at = len(self), int(np.searchsorted(places, place % len(self)))
        beside = places[[(at - 1) % len(places), at % len(places)]]
        moves = (beside - place + count // 2) % count - count // 2
        return int(moves[np.abs(moves).argmin()])


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"haystack: {file} is not UTF-8 text (byte {error.start:,}).") from None
    except OSError as error:
        raise DataError(f"haystack: {file} cannot be read ({error.strerror}).") from None


def _tokenised(text: str, tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids of a text and the places of its lines, sentences and whole characters."""
    known = {"return_offsets_mapping": True} if tokenizer.is_fast else {}
    encoded = tokenizer(text, add_special_tokens=False, verbose=False, **known)
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    if not known or not len(ids):
        nowhere = np.empty(0, dtype=np.int64)
        return ids, nowhere, nowhere, np.arange(len(ids))
    starts, ends = np.asarray(encoded["offset_mapping"]).T
    whole = np.concatenate([[True], starts[1:] >= ends[:-1]])
    lines = [0, *(match.end() for match in _LINE.finditer(text))]
    sentences = [match.end() for match in _SENTENCE.finditer(text)]
    return ids, _begun(text, lines, starts, whole), _begun(text, sentences, starts, whole), whole.nonzero()[0]


def _begun(text: str, borders: Sequence[int], starts: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return the tokens that begin at borders of the text, with nothing but blanks between."""
    first = np.searchsorted(starts, borders)
    return np.unique(
        [
            token
            for token, border in zip(first.tolist(), borders, strict=True)
            if token < len(starts) and whole[token] and not text[border : starts[token]].strip()
        ]
    ).astype(np.int64)

"""Rows of an exact number of tokens: haystack, a needle at a depth of it, a question, and the answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.errors import ConfigError
from longspan.evaluate.haystack import Haystack
from longspan.evaluate.settings import NeedleSettings

_COLOURS = ("amber", "azure", "copper", "crimson", "golden", "indigo", "ivory", "olive", "scarlet", "silver", "violet")
_THINGS = (
    "anchor",
    "bridge",
    "compass",
    "garden",
    "harbour",
    "lantern",
    "library",
    "mill",
    "orchard",
    "tower",
    "vault",
)
_NEAR = 0.02
"""How far a line or a sentence may be from the asked depth, as a share of the haystack."""

_HERE = "\u27e8haystack\u27e9"
"""Stands for the user's text while a chat template is written out."""


@dataclass(frozen=True)
class Row:
    """What a row consists of, in order: opening, haystack, needle, haystack, tail, answer.

    Args:
        length: tokens of the row.
        asked: depth in percent that was asked for.
        start: place of the haystack where the row's stretch begins.
        before, after: tokens of haystack on either side of the needle.
        cut: what begins where the haystack was cut: `line`, `sentence` or `token`; `end` for its own ends.
    """

    length: int
    asked: float
    key: str
    value: str
    opening: Sequence[int]
    needle: Sequence[int]
    tail: Sequence[int]
    answer: Sequence[int]
    start: int
    before: int
    after: int
    cut: str

    @property
    def depth(self) -> float:
        """Tokens of haystack before the needle, in percent."""
        return 100 * self.before / (self.before + self.after)


class Prompts:
    """Makes rows for a tokenizer; the same settings make the same rows on every process.

    Args:
        tokenizer: of the model.

    Raises:
        ConfigError: there is no chat template where one is asked for, or none that text can be put into.
    """

    def __init__(self, tokenizer: Any, haystack: Haystack, settings: NeedleSettings) -> None:
        self.tokenizer, self.haystack, self.settings = tokenizer, haystack, settings
        self._opening, self._closing = self._in_chat() if settings.chat else (_leading(tokenizer), "")

    def rows(self) -> list[Row]:
        """Make all rows, the shortest first; a row of the same depth and trial every `depths` times `trials`.

        Raises:
            ConfigError: a length that has no room for a haystack, or an answer whose tokens cannot be told apart.
        """
        asked = self.settings
        return [
            self._row(length, depth, trial)
            for length in sorted(asked.lengths)
            for depth in sorted(asked.depths)
            for trial in range(asked.trials)
        ]

    def ids(self, row: Row) -> Tensor:
        """Return the token ids of a row, [length]."""
        stretch = self.haystack.take(row.start, row.before + row.after)
        parts = (row.opening, stretch[: row.before], row.needle, stretch[row.before :], row.tail, row.answer)
        return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]))

    def _row(self, length: int, depth: float, trial: int) -> Row:
        asked = self.settings
        draw = random.Random(f"{asked.seed} {length} {depth} {trial}")
        key = f"{draw.choice(_COLOURS)} {draw.choice(_THINGS)}"
        value = str(draw.randrange(10 ** (asked.digits - 1) if asked.digits > 1 else 0, 10**asked.digits))
        needle = self._encode(asked.needle.format(key=key, value=value))
        tail, answer = self._ending(key, value)
        given = sum(map(len, (self._opening, needle, tail, answer)))
        room = length - given
        if room < 1:
            raise ConfigError(
                f"A row of {length:,} tokens has no room for a haystack: needle, question and answer take {given:,}. "
                f"Ask for lengths above {given:,}."
            )
        start = self.haystack.start(draw)
        before, cut = round(room * depth / 100), "end"
        if 0 < before < room:
            moved, cut = self.haystack.cut(start + before, int(room * _NEAR))
            before = min(max(before + moved, 0), room)
        return Row(length, depth, key, value, self._opening, needle, tail, answer, start, before, room - before, cut)

    def _ending(self, key: str, value: str) -> tuple[list[int], list[int]]:
        """Return the tokens after the haystack up to the answer, and those of the answer.

        A blank before the value goes with it, as most tokenizers write words with the blank before them.
        """
        question = self.settings.question.format(key=key)
        lead, _, rest = self.settings.answer.partition("{value}")
        lead = lead.format(key=key)
        given = lead.rstrip(" ")
        scored = lead[len(given) :] + value + rest.format(key=key)
        text = question + self._closing + given
        tail, both = self._encode(text), self._encode(text + scored)
        if both[: len(tail)] != tail or len(both) == len(tail):
            raise ConfigError(
                f"The tokens of the answer {scored!r} cannot be told from those before it: the tokenizer joins it with "
                f"{text[-12:]!r}. Let the part of `answer` before {{value}} end in another character."
            )
        return tail, both[len(tail) :]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _in_chat(self) -> tuple[list[int], str]:
        """Return the tokens before the user's text in the chat template, and the text after it."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("The tokenizer has no chat template: leave chat out, or take a model that has one.")
        messages = [{"role": "user", "content": _HERE}]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs, and fail in their own ways
            raise ConfigError(f"The chat template cannot be used: {str(error).strip().splitlines()[0]}") from None
        before, found, after = text.partition(_HERE)
        if not found or _HERE in after:
            raise ConfigError(f"The chat template shows the user's text {text.count(_HERE)} times, not once: {text!r}.")
        return self._encode(before), after


def _leading(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before text."""
    plain, special = (
        tokenizer("a", add_special_tokens=special, verbose=False)["input_ids"] for special in (False, True)
    )
    at = next(i for i in range(len(special)) if special[i : i + len(plain)] == plain)
    return special[:at]

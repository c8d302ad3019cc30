"""What a needle-in-a-haystack evaluation is asked for."""

from __future__ import annotations

import string
from dataclasses import dataclass

from longspan.errors import ConfigError

NEEDLE = "\nThe access code of the {key} is {value}.\n"
QUESTION = "\nWhat is the access code of the {key} that the text above mentions?\n"
ANSWER = "The access code of the {key} is {value}"


@dataclass(frozen=True)
class NeedleSettings:
    """Say which rows are made, and what stands in them.

    Args:
        lengths: tokens per row, prompt and answer together.
        depths: share of the haystack before the needle, in percent.
        trials: rows per length and depth, each with a key, a value and a stretch of haystack of its own.
        seed: of keys, values and stretches.
        digits: of the value.
        needle: the sentence to find; {key} and {value} stand for what is drawn.
        question: what is asked after the haystack.
        answer: how the answer reads; what stands before {value} is given to the model, the rest is scored.
        chat: put haystack and question into the tokenizer's chat template, and the answer into the model's turn.
        allow_longer: also rows beyond the positions that the model knows.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    trials: int = 3
    seed: int = 0
    digits: int = 7
    needle: str = NEEDLE
    question: str = QUESTION
    answer: str = ANSWER
    chat: bool = False
    allow_longer: bool = False

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("depths", self.depths)):
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} must be one or more numbers, each once, got {list(values)}.")
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ConfigError(f"depths must lie from 0 to 100 percent of the haystack, got {depth:g}.")
        if min(self.lengths) < 1:
            raise ConfigError(f"lengths must be numbers of tokens, 1 or more, got {min(self.lengths)}.")
        for name, value in (("trials", self.trials), ("digits", self.digits)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        for name, needed, known in (
            ("needle", {"value"}, {"key", "value"}),
            ("question", set(), {"key"}),
            ("answer", {"value"}, {"key", "value"}),
        ):
            _check_template(name, getattr(self, name), needed, known)
        if self.answer.count("{value}") > 1:
            raise ConfigError(f"answer must hold {{value}} once, as it is scored from there on, got {self.answer!r}.")


def _check_template(name: str, text: str, needed: set[str], known: set[str]) -> None:
    """Refuse a template that lacks a field, or has one that it must not have."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(
            f"{name} is not a template ({error}): {text!r}. Write a brace itself as {{{{ or }}}}."
        ) from None
    fields = {field for _, field, *_ in parts if field is not None}
    plain = all(not spec and not conversion for _, field, spec, conversion in parts if field is not None)
    if not plain or fields - known or needed - fields:
        must = f"must hold {' and '.join(f'{{{field}}}' for field in sorted(needed))}, " if needed else ""
        may = ", ".join(f"{{{field}}}" for field in sorted(known))
        raise ConfigError(f"{name} {must}may hold {may} and no other field, got {text!r}.")

"""Turn texts, prompts with completions, and conversations into token ids, and say which of them are targets."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from longspan.integrations.tokenizer import encode

Encoded = tuple[list[int], list[bool] | None]
"""Token ids, and for each whether it is a target; None: all are."""

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WAY_OUT = "give data.chat_template a file whose template has {% generation %} marks, or set data.targets: all"
_SHOWN_CHARACTERS = 200
_TEMPLATE_ERRORS = (  # of a program of somebody else's, on messages that it was not written for
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class Encoder:
    """Encodes documents with one tokenizer. What it raises are ValueErrors about the document.

    Args:
        targets: `assistant`: what assistants and completions say; `all`: every token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: str = "assistant") -> None:
        self._tokenizer, self._all = tokenizer, targets == "all"
        end: Any = tokenizer.eos_token_id
        self._end: list[int] = [] if end is None else [end]
        self._closes = self._ids("a")[-1:] == self._end != self._ids("a", special=False)[-1:]

    def text(self, text: str) -> list[int]:
        """Encode a text, closed by the tokenizer's end."""
        return encode(self._tokenizer, text)

    def completion(self, prompt: str, completion: str) -> Encoded:
        """Encode a prompt and what follows it, closed by the tokenizer's end.

        The prompt's tokens are those it has alone, as when the model will be asked; they are no targets.
        """
        whole = encode(self._tokenizer, prompt + completion)
        if self._all:
            return whole, None
        before = self._ids(prompt) if prompt else []
        before = before[:-1] if self._closes else before
        if whole[: len(before)] != before:
            apart = before + self._ids(completion, special=False) + self._end
            if self._tokenizer.decode(apart) != self._tokenizer.decode(whole):
                raise ValueError(
                    "the tokenizer joins the end of `prompt` with the start of `completion`; move the white space "
                    "between them from one to the other"
                )
            whole = apart
        return whole, [position >= len(before) for position in range(len(whole))]

    @property
    def has_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._tokenizer.chat_template is not None

    def chat(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None, context: int = 0) -> Encoded:
        """Encode a conversation as the chat template writes it.

        Args:
            tools: what the assistant may call, handed to the template.
            context: messages at the start that are no targets, whoever speaks.

        **Cost**: a rendering per assistant's turn, of all turns before it, unless the template marks them itself.
        """
        whole = self._render(messages, tools)
        self._check_whole(messages, tools, whole)
        if self._all:
            return self._ids(whole, special=False), None
        if _MARK.search(self._tokenizer.get_chat_template(tools=tools)):
            ids, mask = self._marked(messages, tools)
            first = self._tokens(whole).index(self._context(messages[:context], tools, whole)) if context else 0
            return ids, [False] * first + mask[first:]
        tokens = self._tokens(whole)
        mask = [False] * len(tokens.ids)
        for start, end in self._turns(messages, tools, context, whole):
            first, last = tokens.index(start), tokens.index(end)
            mask[first:last] = [True] * (last - first)
        return tokens.ids, mask

    def _check_whole(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, whole: str) -> None:
        """Refuse what a template leaves out, as those do that know no tools, or read `content` in one way only.

        **Cost**: a rendering more where there are tools, and where there are calls of them.
        """
        for number, message in enumerate(messages, 1):
            content = message["content"]
            if isinstance(content, list) and str(content) in whole:
                raise ValueError("the chat template cannot write `content` in parts; write it as one text")
            if message["role"] == "tool":
                continue  # what tools return is written in many ways
            for text in [part["text"] for part in content] if isinstance(content, list) else [content]:
                answer = text.rsplit("</think>", 1)[-1].strip()  # reasoning may be left out on purpose
                if answer not in whole and json.dumps(answer, ensure_ascii=False)[1:-1] not in whole:
                    raise ValueError(
                        f"the chat template leaves out what message {number} says; it may want `content` in parts, or "
                        "know no such role"
                    )
        mute = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
        if mute != list(messages) and self._writes(mute, tools, whole):
            raise ValueError("the chat template leaves `tool_calls` out; give data.chat_template one that knows tools")
        if tools and self._writes(messages, None, whole):
            raise ValueError("the chat template leaves `tools` out; give data.chat_template one that knows tools")

    def _writes(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, text: str) -> bool:
        try:
            return self._render(messages, tools) == text
        except ValueError:
            return False

    def _turns(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, context: int, whole: str
    ) -> Iterator[tuple[int, int]]:
        """Yield where in the whole text each of the assistant's turns starts and ends."""
        for index in range(context, len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            start = self._turn(messages[:index], tools, whole)
            closed = self._render(messages[: index + 1], tools)
            if not whole.startswith(closed) or len(closed) < start:
                raise ValueError(
                    f"the chat template writes message {index + 1} otherwise when more follow, so that what was said "
                    f"cannot be told from what was asked; make it the `completion` of a row of its own, {_WAY_OUT}"
                )
            yield start, len(closed)

    def _turn(self, before: Sequence[dict[str, Any]], tools: list[Any] | None, whole: str) -> int:
        """Return where in the whole text the assistant starts to speak after some messages."""
        opened = self._render(before, tools, add_generation_prompt=True)
        if not whole.startswith(opened):
            raise ValueError(
                f"the chat template does not continue what it writes to ask for message {len(before) + 1}; {_WAY_OUT}"
            )
        return len(opened)

    def _context(self, before: Sequence[dict[str, Any]], tools: list[Any] | None, whole: str) -> int:
        """Return where in the whole text some messages end, with or without what asks for the next one."""
        written = self._render(before, tools)
        return len(written) if whole.startswith(written) else self._turn(before, tools, whole)

    def _render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, **options: Any) -> str:
        with _template_at_work():
            text = self._tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, **options)
        assert isinstance(text, str)
        return text

    def _marked(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> tuple[list[int], list[bool]]:
        with _template_at_work():
            found: Any = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
        return list(found["input_ids"]), [bool(target) for target in found["assistant_masks"]]

    def _ids(self, text: str, special: bool = True) -> list[int]:
        found: Any = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return found

    def _tokens(self, text: str) -> _Tokens:
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"{type(self._tokenizer).__name__} does not tell where tokens stand: set data.targets: all"
            )
        found: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in found["offset_mapping"]]
        return _Tokens(found["input_ids"], starts, [end for _, end in found["offset_mapping"]])


@dataclass(frozen=True)
class _Tokens:
    """A text's tokens, and the characters that each starts and ends at."""

    ids: list[int]
    starts: list[int]
    ends: list[int]

    def index(self, character: int) -> int:
        """Return the first token that starts at a character or after it, where no token lies across."""
        found = bisect_left(self.starts, character)
        if found and self.ends[found - 1] != character:
            raise ValueError(
                "a token of the chat lies across the border between what was asked and what was said; strip the "
                f"white space around `content`, {_WAY_OUT}"
            )
        return found


@contextmanager
def _template_at_work() -> Iterator[None]:
    """Name what a chat template, somebody else's program, raises on messages that it was not written for."""
    try:
        yield
    except _TEMPLATE_ERRORS as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:_SHOWN_CHARACTERS]
        raise ValueError(f"the chat template cannot write it: {reason.rstrip('.')}") from None

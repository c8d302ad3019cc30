"""What a row of data means: which of its fields are the document, and which of its tokens are targets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longspan.batch import IGNORE_INDEX
from longspan.errors import DataError
from longspan.integrations.encoding import Encoder

FIELDS = ("text", "input_ids", "labels", "prompt", "completion", "messages", "tools")
"""Fields that make a document."""

PACKED_FIELDS = ("attention_mask", "position_ids", "cu_seqlens", "seq_lengths", "completion_mask", "assistant_masks")
"""Fields that other programs write beside `input_ids`, and that would change what they mean."""

_LARGEST_ID = 2**31 - 1
_FORMS = ("text", "input_ids", "prompt", "messages")
_NEEDED = "`text`, `input_ids`, `prompt` with `completion`, or `messages`"


@dataclass(frozen=True)
class Document:
    """Tokens that see each other, where they came from, and optionally which of them are targets.

    Args:
        input_ids, labels: int32 [tokens]; labels None means that every token is a target.
    """

    origin: str
    input_ids: np.ndarray
    labels: np.ndarray | None = None


def count_targets(labels: Any) -> int:
    """Count the targets of one document: its first token is nobody's."""
    return int((labels[1:] != IGNORE_INDEX).sum())


def document(origin: str, row: Any, encoder: Encoder, form: str = "auto") -> Document:
    """Make a document of a row.

    Args:
        form: the first field of the form that a row is to have; `auto`: the one it has.

    Raises:
        ValueError: what is wrong with the row.
        DataError: what is wrong with the settings.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be an object with {_NEEDED}, got {type(row).__name__}")
    fields = {name: row[name] for name in (*FIELDS, *PACKED_FIELDS) if row.get(name) is not None}
    found = [name for name in _FORMS if name in fields and (name != "prompt" or "completion" in fields)]
    if form != "auto":
        found = [name for name in found if name == form]
    if len(found) != 1:
        has = f"has `{'` and `'.join(found)}`; choose by data.form" if found else f"has {_names(row)}"
        raise ValueError(f"a row must have either {_NEEDED}; this one {has}")
    if "labels" in fields and found != ["input_ids"]:
        raise ValueError("`labels` need `input_ids`; they cannot be aligned with text")
    if found == ["text"]:
        text = _text("text", fields["text"])
        return Document(origin, ids(encoder.text(text) if text else []))
    if found == ["input_ids"]:
        return _tokens(origin, fields)
    encoded = _prompted(origin, fields, encoder) if found == ["prompt"] else _chat(origin, fields, encoder)
    input_ids, targets = ids(encoded[0]), encoded[1]
    labels = None if targets is None else np.where(np.asarray(targets, dtype=bool), input_ids, np.int32(IGNORE_INDEX))
    return Document(origin, input_ids, labels)


def ids(values: Any, lowest: int = 0) -> np.ndarray:
    """Check token ids and return them as int32.

    Raises:
        ValueError: they are not a flat list of whole numbers in range.
    """
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise ValueError(f"token ids must be a list of whole numbers, got {type(values).__name__}")
    if not isinstance(values, np.ndarray):
        others = {kind.__name__ for kind in set(map(type, values)) - {int}}
        if others:
            flat = "a flat list" if "list" in others else "a list"
            raise ValueError(f"token ids must be {flat} of whole numbers, got {', '.join(sorted(others))} among them")
    array = np.asarray(values) if len(values) else np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be a flat list of whole numbers, got {array.ndim}-D {array.dtype}")
    if len(array) and (array.min() < lowest or array.max() > _LARGEST_ID):
        raise ValueError(f"token ids must lie from {lowest} to {_LARGEST_ID}, got {array.min()} to {array.max()}")
    return array.astype(np.int32)


def _tokens(origin: str, fields: Mapping[str, Any]) -> Document:
    input_ids = ids(fields["input_ids"])
    count = len(input_ids)
    for name, expected in (("attention_mask", np.ones(count)), ("position_ids", np.arange(count))):
        if name in fields and not np.array_equal(ids(fields[name]), expected):
            raise ValueError(f"`{name}` says that `input_ids` hold padding or several documents; write each as a row")
    others = [name for name in PACKED_FIELDS[2:] if name in fields]
    if others:
        raise ValueError(f"`{others[0]}` is not read; write each document as a row, with {IGNORE_INDEX} in `labels`")
    if "labels" not in fields:
        return Document(origin, input_ids)
    labels = ids(fields["labels"], lowest=IGNORE_INDEX)
    if len(labels) != count:
        raise ValueError(f"{len(labels)} `labels` for {count} `input_ids`")
    if ((labels < 0) & (labels != IGNORE_INDEX)).any():
        raise ValueError(f"`labels` must be token ids, or {IGNORE_INDEX} for no target")
    return Document(origin, input_ids, labels)


def _prompted(origin: str, fields: Mapping[str, Any], encoder: Encoder) -> tuple[list[int], list[bool] | None]:
    prompt, completion = fields["prompt"], fields["completion"]
    if not isinstance(prompt, str) and not isinstance(completion, str):
        _need_template(origin, encoder)
        before, after = _messages("prompt", prompt), _messages("completion", completion)
        return encoder.chat([*before, *after], _tools(fields), context=len(before))
    if "tools" in fields:
        raise ValueError("`tools` need messages")
    return encoder.completion(_text("prompt", prompt), _text("completion", completion))


def _chat(origin: str, fields: Mapping[str, Any], encoder: Encoder) -> tuple[list[int], list[bool] | None]:
    _need_template(origin, encoder)
    return encoder.chat(_messages("messages", fields["messages"]), _tools(fields))


def _need_template(origin: str, encoder: Encoder) -> None:
    if not encoder.has_template:
        raise DataError(
            f"{origin}: conversations need a chat template, and the tokenizer has none: set data.chat_template to a "
            "file with one, or data.tokenizer to one that has it."
        )


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Check what no template can do without, and leave the rest to it."""
    found = []
    for number, item in enumerate(_objects(f"`{name}`", value), 1):
        place = f"message {number} of `{name}`"
        if not isinstance(item.get("role"), str):
            raise ValueError(f'{place} must have a `role`, such as "user"')
        content, calls = item.get("content"), item.get("tool_calls")
        if content is None and not calls:
            raise ValueError(f"{place} must have `content` or `tool_calls`")
        if isinstance(content, list):
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                if kind != "text" or not isinstance(part.get("text"), str):
                    raise ValueError(f"{place} has a part {kind!r}; parts must be text")
        elif content is not None and not isinstance(content, str):
            raise ValueError(f"`content` of {place} must be a string, got {type(content).__name__}")
        message = {**item, "content": "" if content is None else content}
        if calls is not None:
            message["tool_calls"] = [_call(place, call) for call in _objects(f"`tool_calls` of {place}", calls)]
        found.append(message)
    if not found:
        raise ValueError(f"`{name}` holds no message")
    _check_plain(name, found)
    return found


def _call(place: str, call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates want it and some write it as text."""
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call of {place} names no function")
    if isinstance(function.get("arguments"), str):
        (arguments,) = _objects(f"`arguments` of {place}", [function["arguments"]])
        function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    if "tools" not in fields:
        return None
    tools = _objects("`tools`", fields["tools"])
    _check_plain("tools", tools)
    return tools or None


def _objects(name: str, value: Any) -> list[dict[str, Any]]:
    """Return a list of objects; it or they may be JSON text, as in tables whose columns have one type."""
    items = _parsed(name, value)
    if not isinstance(items, list):
        raise ValueError(f"{name} must be a list of objects, got {type(items).__name__}")
    parsed = [_parsed(name, item) for item in items]
    for item in parsed:
        if not isinstance(item, dict):
            raise ValueError(f"{name} must be a list of objects, got {type(item).__name__} in it")
    return parsed


def _parsed(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except json.JSONDecodeError:
        raise ValueError(f"{name} must be a list of objects, got text that is not JSON") from None


def parse_json(text: str) -> Any:
    """Parse JSON as its standard has it: without NaN and infinities.

    Raises:
        ValueError: it is not JSON.
    """
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` must be a string, got {type(value).__name__}")
    _check_plain(name, value)
    return value


def _check_plain(name: str, value: Any) -> None:
    """Refuse what JSON cannot hold, and halves of characters, which tokenizers cannot take."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"`{name}` has half of a surrogate pair, which is no character") from None
    except TypeError as error:
        raise ValueError(f"`{name}` holds what JSON cannot: {error}") from None


def _names(row: Mapping[str, Any]) -> str:
    names = [ascii(name) for name, value in row.items() if value is not None]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"

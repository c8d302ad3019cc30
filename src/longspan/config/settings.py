"""Walk the schema: every setting by its dotted name, with what help and errors say about it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from longspan.config.schema import RunConfig

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_SIZES = {"tokens": ", also as 128K (x 1024) or 1M", "bytes": ", also as 64GiB or 1.5TiB"}
_KINDS = {
    bool: "true | false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "name: value",
    tuple: "a list",
}


@dataclass(frozen=True)
class Setting:
    """One field of the schema.

    Args:
        path: names from the top, such as ("optimizer", "lr").
        kind: its type without None.
        default: its default; meaningless where required.
    """

    path: tuple[str, ...]
    kind: Any
    required: bool
    default: Any
    description: str
    unit: str | None
    example: Any
    allowed: str

    @property
    def name(self) -> str:
        """Dotted name, as errors and the documentation write it."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The command line's flag."""
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def help(self) -> str:
        """One line: meaning, allowed values, unit, default."""
        default = "required in the file or here" if self.required else f"default {_text(self.default)}"
        facts = [self.allowed, f"in {self.unit}" if self.unit else "", default]
        return f"{self.description} ({'; '.join(fact for fact in facts if fact)})"


def settings(section: type[BaseModel] = RunConfig, prefix: tuple[str, ...] = ()) -> Iterator[Setting]:
    """List every setting of a section and of the sections in it, in the order of the schema."""
    for name, field in section.model_fields.items():
        kind = _kind(field.annotation)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from settings(kind, (*prefix, name))
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        yield Setting(
            path=(*prefix, name),
            kind=kind,
            required=field.is_required(),
            default=field.default,
            description=field.description or "",
            unit=extra.get("unit"),  # pyright: ignore[reportArgumentType]
            example=extra.get("example"),
            allowed=_allowed(kind, field),
        )


def _kind(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (arg for arg in get_args(annotation) if arg is not type(None))
    if hasattr(annotation, "__metadata__"):
        annotation = get_args(annotation)[0]
    return annotation


def _allowed(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(get_args(kind))
    bounds = [
        f"{sign} {getattr(item, bound)}"
        for item in field.metadata
        for bound, sign in _BOUNDS.items()
        if getattr(item, bound, None) is not None
    ]
    if any(getattr(item, "min_length", None) for item in field.metadata):
        bounds.append("that is not empty")
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    sizes = _SIZES.get(str(extra.get("unit")), "") if kind is int else ""
    return f"{_KINDS[get_origin(kind) or kind]} {' and '.join(bounds)}".strip() + sizes


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)

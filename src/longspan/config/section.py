"""What every group of settings is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from longspan.errors import ConfigError

_SIZE = re.compile(r"(\d+)([KM]?)", re.IGNORECASE)
_FACTOR = {"": 1, "K": 1024, "M": 1024**2}
_BYTES = re.compile(r"(\d{1,20}(?:\.\d{1,9})?)\s*(?:([KMGT])(i?B)?)?", re.IGNORECASE | re.ASCII)
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(value: Any) -> int:
    """Read a number of tokens: 131072, "128K" (times 1024) or "1M" (times 1024 squared).

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a size: write a whole number, 128K (x 1024) or 1M (x 1024 x 1024)")
    return int(match[1]) * _FACTOR[match[2].upper()]


def parse_bytes(value: Any) -> int:
    """Read an amount of memory: 1048576, "64GiB" or "64G" (times 1024 cubed), "1.9TB" (times 1000 to the fourth).

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"An amount of memory is given as 64GiB, 1.9TB or a number of bytes, got {value!r}.")
    base = 1000 if (match[3] or "").upper() == "B" else 1024
    return round(float(match[1]) * base ** _POWER[(match[2] or "").upper()])


def _number(value: Any) -> Any:
    # YAML's true would pass as 1.
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


def one_or_many(value: Any) -> Any:
    """Let one text stand for a list of it."""
    return (value,) if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Rate = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
Size = Annotated[int, BeforeValidator(parse_size)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Texts = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]


def field(description: str, default: Any = ..., *, example: Any, unit: str | None = None, **bounds: Any) -> Any:
    """Declare a setting: the schema, the errors and the command line's help are all made from this."""
    return Field(default, description=description, json_schema_extra={"example": example, "unit": unit}, **bounds)


class Section(BaseModel):
    """A group of settings: frozen, and closed to names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

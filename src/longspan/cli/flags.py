"""Turn the settings' schema, or a dataclass, into command line flags."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer
from pydantic import BaseModel

from longspan.config import AdapterConfig, RunConfig, Setting, parse_size, settings
from longspan.config.section import parse_bytes
from longspan.errors import ConfigError


def option(text: str, metavar: str, **more: Any) -> Any:
    """Describe a flag: its help, and what stands for its value there."""
    return typer.Option(help=text, metavar=metavar, **more)


def size(flag: str, text: str) -> int:
    """Read a flag's number of tokens: 131072, 128K, 1M.

    Raises:
        ConfigError: it is none.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text or repr(text)} is {error}.") from None


def amount(flag: str, text: str) -> int:
    """Read a flag's amount of memory: 64GiB, 1.9TB, or a number of bytes.

    Raises:
        ConfigError: it is none, or less than any machine has but not 0, such as 80 for 80 GiB.
    """
    try:
        found = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if 0 < found < 1 << 20:
        raise ConfigError(
            f"{flag} {text} is {found:,} bytes, which is less than 1 MiB: write it with a unit, as 64GiB."
        )
    return found


LoraRank = Annotated[
    int | None, option("Train adapters of this rank beside all linear modules. (default: the model)", "N", min=1)
]


def lora(rank: int | None) -> AdapterConfig | None:
    """Return the adapters that a `LoraRank` asks for."""
    return None if rank is None else AdapterConfig(kind="lora", rank=rank)


_METAVARS = {int: "N", float: "X", str: "TEXT"}


def with_settings(command: Callable[..., None], schema: type[BaseModel] = RunConfig) -> Callable[..., None]:
    """Give a command a flag per setting of a schema; its `overrides` parameter gets those that were used, by path."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "overrides"]
    known = {"set_" + "_".join(setting.path): setting for setting in settings(schema)}
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(setting))
        for name, setting in known.items()
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        used = {known[name].path: values.pop(name) for name in known if name in values}
        command(**values, overrides={path: value for path, value in used.items() if value is not None})

    run.__signature__ = inspect.Signature([*own, *flags])  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *flags)}
    del run.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
    return run


def with_flags(flags: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a parameter per field of a dataclass: typer reads them from its signature.

    Args:
        flags: a dataclass whose fields are annotated with their options.
    """
    hints = get_type_hints(flags, include_extras=True)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
            [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                    annotation=hints[field.name],
                )
                for field in fields(flags)
            ]
        )
        command.__annotations__ = hints
        return command

    return decorate


def _annotation(setting: Setting) -> Any:
    section = f"Settings: {setting.path[0]}" if len(setting.path) > 1 else "Settings"
    if setting.kind is bool:
        flag = f"{setting.flag}/--no-{setting.flag[2:]}"
        return Annotated[bool | None, typer.Option(flag, help=setting.help, rich_help_panel=section)]
    metavar = _METAVARS.get(setting.kind, "VALUE")
    return Annotated[
        str | None, typer.Option(setting.flag, help=setting.help, metavar=metavar, rich_help_panel=section)
    ]

"""The command line is a promise: its flags are written down, and change only on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from longspan.cli import app
from longspan.config import settings

FROZEN = Path(__file__).with_name("cli_flags.txt")


def flags() -> list[str]:
    return sorted(flag for name, command in commands(typer.main.get_command(app)) for flag in flags_of(name, command))


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def flags_of(name: str, command: Any) -> list[str]:
    names = [n for parameter in command.params for n in (*parameter.opts, *parameter.secondary_opts)]
    return [f"{name} {flag}" for flag in names if flag != "--help"]


def test_flags_are_the_promised_ones() -> None:
    assert flags() == FROZEN.read_text().splitlines(), (
        f"The command line changed. If that is meant, write it to {FROZEN.name} and to the changelog."
    )


def test_every_setting_has_its_flag() -> None:
    assert {f"train {setting.flag}" for setting in settings()} <= set(flags())

"""The command line is a promise: its flags are written down, and change only on purpose."""

from __future__ import annotations

from pathlib import Path

import typer.main

from longspan.cli import app
from longspan.config import settings

FROZEN = Path(__file__).with_name("cli_flags.txt")


def flags() -> list[str]:
    found = []
    for name, command in typer.main.get_command(app).commands.items():  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in command.params:
            names = [*parameter.opts, *parameter.secondary_opts]
            found += [f"{name} {flag}" for flag in names if flag != "--help"]
    return sorted(found)


def test_flags_are_the_promised_ones() -> None:
    assert flags() == FROZEN.read_text().splitlines(), (
        f"The command line changed. If that is meant, write it to {FROZEN.name} and to the changelog."
    )


def test_every_setting_has_its_flag() -> None:
    assert {f"train {setting.flag}" for setting in settings()} <= set(flags())

"""Public names exist, are listed, and explain themselves."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import longspan
import longspan.errors

PROMISED = {"prepare", "attend", "reduce_loss", "tile", "tiled_loss", "tiled_mlp", "offload_checkpoints"}


@pytest.mark.parametrize("name", sorted(longspan.__all__))
def test_public_name(name: str) -> None:
    assert inspect.getdoc(getattr(longspan, name))


def test_promised_names_are_public() -> None:
    assert set(longspan.__all__) >= PROMISED
    assert set(longspan.__all__) <= set(dir(longspan))


def test_messages_name_only_what_exists() -> None:
    """Errors and docstrings tell users to pass `longspan.NAME(...)`; that name must be there."""
    source = Path(longspan.__file__).parent
    for file in source.rglob("*.py"):
        for name in re.findall(r"\blongspan\.([A-Za-z]\w*)\(", file.read_text()):
            assert name in longspan.__all__, f"{file.relative_to(source)} speaks of longspan.{name}"


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'prepair'"):
        _ = longspan.prepair  # pyright: ignore[reportAttributeAccessIssue]


def test_every_error_is_ours() -> None:
    errors = [value for value in vars(longspan.errors).values() if inspect.isclass(value)]
    assert len(errors) > 5
    assert all(issubclass(error, longspan.errors.LongspanError) for error in errors)

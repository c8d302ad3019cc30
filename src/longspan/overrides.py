"""Attributes that something else stands in for, on one object alone."""

from __future__ import annotations

from typing import Any


class _Absent:
    """What an object's own attributes had under a name: nothing."""


class Overrides:
    """Remember what stood in objects' own attributes, and give it back; false when nothing is replaced."""

    def __init__(self) -> None:
        self._own: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._own)

    def set(self, owner: Any, **values: Any) -> None:
        """Set attributes of this object, whatever its class has under their names."""
        for name, value in values.items():
            self._own.append((owner, name, vars(owner).get(name, _Absent)))
            vars(owner)[name] = value

    def restore(self) -> None:
        """Give back all attributes, the last ones first; doing so again does nothing."""
        while self._own:
            owner, name, value = self._own.pop()
            if value is _Absent:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = value

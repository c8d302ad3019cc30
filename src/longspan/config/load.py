"""Read a run's settings and say everything that is wrong with them at once, in the user's words."""

from __future__ import annotations

import difflib
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from longspan.config.data import InspectConfig
from longspan.config.schema import RunConfig
from longspan.config.settings import settings
from longspan.errors import ConfigError

Keys = tuple[str, ...]
S = TypeVar("S", RunConfig, InspectConfig)
_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


@dataclass
class Origins:
    """Where each value came from: a line of the file, or a flag."""

    file: str | None = None
    lines: dict[Keys, int] = field(default_factory=dict)
    flags: dict[Keys, str] = field(default_factory=dict)

    def of(self, path: Keys) -> str:
        """Name the place of a value, or of the nearest section around it; empty when unknown."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.flags:
                return f" ({self.flags[path[:end]]})"
            if path[:end] in self.lines:
                return f" ({self.file}:{self.lines[path[:end]]})"
        return f" ({self.file})" if self.file else ""


def load_config(path: str | Path, overrides: Mapping[Keys, Any] | None = None) -> RunConfig:
    """Read a YAML file, lay the command line's values over it, and validate the result.

    Args:
        overrides: values by path, such as {("optimizer", "lr"): 1e-4}. Text is read as YAML where the setting is
            not text.

    Raises:
        ConfigError: everything wrong with it, one line each.
    """
    values, origins = _read(Path(path))
    return parse_config(values, overrides, origins)


def load_inspect_config(path: Path | None, overrides: Mapping[Keys, Any]) -> InspectConfig:
    """Read what a run's YAML file, if there is one, and the command line say of its data.

    Raises:
        ConfigError: everything wrong with it, one line each; other settings of a run are not looked at.
    """
    values, origins = ({}, Origins()) if path is None else _read(path)
    others = RunConfig.model_fields.keys() - InspectConfig.model_fields.keys()
    values = {name: value for name, value in values.items() if name not in others}
    return _validate(InspectConfig, values, overrides, origins)


def parse_config(
    values: dict[str, Any], overrides: Mapping[Keys, Any] | None = None, origins: Origins | None = None
) -> RunConfig:
    """Validate settings that are already a dictionary.

    Raises:
        ConfigError: everything wrong with them, one line each.
    """
    return _validate(RunConfig, values, overrides or {}, origins or Origins())


def _validate(schema: type[S], values: dict[str, Any], overrides: Mapping[Keys, Any], origins: Origins) -> S:
    for path, value in overrides.items():
        _override(values, path, value, origins)
    try:
        config = schema.model_validate(values)
    except ValidationError as error:
        raise _explain(error, origins) from None
    place = origins.of(("data", "files"))
    files = tuple(expand_placeholders(text, f"data.files{place}") for text in config.data.files)
    return config.model_copy(update={"data": config.data.model_copy(update={"files": files})})


def _read(path: Path) -> tuple[dict[str, Any], Origins]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"No such file: {path}. Give the path of a run's YAML file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {path}: {error}.") from None
    origins = Origins(str(path))
    return _parse_yaml(text, origins), origins


def _parse_yaml(text: str, origins: Origins) -> dict[str, Any]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{origins.file}{line} is not YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{origins.file} is not YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{origins.file} must hold `name: value` lines, such as `sequence_length: 128K`.")
    _note_lines(node, (), origins)
    return values


def _note_lines(node: yaml.Node | None, path: Keys, origins: Origins) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        at = (*path, str(key.value))
        line = key.start_mark.line + 1
        if at in origins.lines:
            raise ConfigError(
                f"{origins.file}:{line}: {'.'.join(at)} stands twice (first on line {origins.lines[at]}); keep one."
            )
        origins.lines[at] = line
        _note_lines(value, at, origins)


def _override(values: dict[str, Any], path: Keys, value: Any, origins: Origins) -> None:
    setting = next(s for s in settings() if s.path == path)
    if isinstance(value, str) and setting.kind is not str:
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"{setting.flag}: cannot read {value!r}; example: {setting.example}.") from None
    origins.flags[path] = setting.flag
    for name in path[:-1]:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            return  # validation names the section that is not one
        values = inner
    values[path[-1]] = value


def expand_placeholders(text: str, setting: str) -> str:
    """Replace ${stdlib} by the folder of Python's standard library.

    Args:
        setting: what the text is the value of, for the error.

    Raises:
        ConfigError: another placeholder.
    """
    known = {"stdlib": sysconfig.get_path("stdlib")}
    for name in _PLACEHOLDER.findall(text):
        if name not in known:
            raise ConfigError(f"{setting}: ${{{name}}} means nothing; the only placeholder is ${{stdlib}}.")
    return _PLACEHOLDER.sub(lambda match: known[match[1]], text)


def _explain(error: ValidationError, origins: Origins) -> ConfigError:
    lines = list(dict.fromkeys(_line(dict(item), origins) for item in error.errors(include_url=False)))
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} settings cannot be used:\n  " + "\n  ".join(lines))


def _line(item: dict[str, Any], origins: Origins) -> str:
    path = tuple(str(part) for part in item["loc"])
    known = {setting.path: setting for setting in settings()}
    element = path and path not in known and path[:-1] in known
    if element:  # of a list or a dictionary: speak of the setting
        path = path[:-1]
    place, name = origins.of(path), ".".join(path)
    if item["type"] == "extra_forbidden":
        return f"{name}{place} is not a setting.{_nearest(path)}"
    if item["type"] == "missing":
        return f"{name}{place} is missing.{_example(known.get(path), name)}"
    if path in known:
        setting = known[path]
        if isinstance(item.get("ctx", {}).get("error"), ConfigError):  # which says what is allowed, and what was got
            return f"{name}{place}: {_sentence(item['msg'].removeprefix('Value error, '))}{_example(setting, name)}"
        allowed = _sentence(item["msg"]) if element else f"Allowed: {setting.allowed}."
        return f"{name}{place}: {item['input']!r} cannot be used. {allowed}{_example(setting, name)}"
    if item["type"] in ("model_type", "model_attributes_type"):
        return f"{name}{place} must be a section of `name: value` lines, got {item['input']!r}."
    return f"{name + place + ': ' if name else ''}{_sentence(item['msg'].removeprefix('Value error, '))}"


def _nearest(path: Keys) -> str:
    section: Any = RunConfig
    for name in path[:-1]:
        section = section.model_fields[name].annotation
    names = list(section.model_fields) if issubclass(section, BaseModel) else []
    near = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {'.'.join((*path[:-1], near[0]))}?"
    elsewhere = difflib.get_close_matches(path[-1], [s.path[-1] for s in settings()], n=1, cutoff=0.8)
    for setting in settings():
        if elsewhere and setting.path[-1] == elsewhere[0]:
            return f" Did you mean {setting.name}?"
    return f" Known here: {', '.join(names)}."


def _example(setting: Any, name: str) -> str:
    return f" Example: `{name.rsplit('.')[-1]}: {setting.example}`." if setting else f" Add a `{name}:` section."


def _sentence(text: str) -> str:
    return text.rstrip(".") + "."

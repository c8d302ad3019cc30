"""Settings and plan arguments of any kind are taken, or refused by a validator with one clear error."""

from __future__ import annotations

import ast
import copy
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

import longspan
from longspan.config import load_config, parse_config, settings
from longspan.config.schema import RunConfig
from longspan.errors import ConfigError, LongspanError
from test_plan_public import run

SOURCE = Path(longspan.__file__).parent
MANY = "LONGSPAN_FUZZ" in os.environ  # minutes: ten thousand settings in all
DICTIONARIES, TEXTS, PLANS = (8500, 1500, 150) if MANY else (4000, 250, 40)
BASE: dict[str, Any] = {
    "model": {"name": "tiny-llama", "init": "random"},
    "data": {"files": ["data/*.txt"], "tokenizer": "bytes"},
    "sequence_length": "8K",
    "max_steps": 10,
    "output_dir": "out/run",
}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 2**200, -(2**70), 0.5, -0.0, 1e308, float("inf"), float("nan"), "", " ", "128K",
    "1e9", "-3", "\u0000", "\udcff", "ünïcode", "../../etc", "${stdlib}", "${home}", "a" * 5000, [], [[]], {},
    {"": None}, [1, "a", None], {"name": "x"}, ("a",), b"bytes", 3 + 4j, object, [0.9, 0.95], [0.9, 1.5], "auto",
    "none", "null",
]  # fmt: skip


def fitting(draw: random.Random, setting: Any) -> Any:
    """Return a value that the setting alone would take."""
    kind = setting.kind
    if get_origin(kind) is not None and get_args(kind) and all(isinstance(arg, str) for arg in get_args(kind)):
        return draw.choice(get_args(kind))
    if kind is bool:
        return draw.random() < 0.5
    if setting.default is not None and not setting.required and draw.random() < 0.5:
        value = setting.default
        return list(value) if isinstance(value, tuple) else value
    example = setting.example
    return yaml.safe_load(example) if isinstance(example, str) and example[:1] in "[{" else example


def put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        below = values.setdefault(part, {})
        if not isinstance(below, dict):
            values[part] = below = {}
        values = below
    values[path[-1]] = value


def memory_drawn(draw: random.Random) -> dict[str, Any]:
    """Return a memory section, of which some fields fit the others and some do not."""
    keeps = ["auto", "x", "x+O", "x,none*6", ["x+O", "O"], ["x", "none*3"], "products", "graph", "O", "x*0", ["x", 1]]
    fields: dict[str, list[Any]] = {
        "tile_tokens": ["1K", 64],
        "compile": ["inductor", "eager", "fast"],
        "rebuilt": ["O", "x+O", "none", ["x", "O"], "graph"],
        "gpu_bytes": ["1GiB", 0, "1.5tib", "12GB"],
        "host_bytes": ["2MiB", 7, -1],
        "directory": ["/tmp", ""],
        "moving_bytes": ["64kib", 0],
    }
    chosen = draw.sample(list(fields), draw.choice((0, 1, 2, 3, 4)))
    return {"keep": draw.choice(keeps), **{name: draw.choice(fields[name]) for name in chosen}}


def settings_drawn(draw: random.Random) -> dict[str, Any]:
    """Return settings with a few changes, of which some fit and some do not."""
    values = copy.deepcopy(BASE)
    known = list(settings())
    if draw.random() < 0.1:
        values["memory"] = memory_drawn(draw)
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        setting = draw.choice(known)
        kind = draw.random()
        if kind < 0.7:
            put(values, setting.path, fitting(draw, setting))
        elif kind < 0.88:
            put(values, setting.path, draw.choice(ODD))
        elif kind < 0.94:
            put(values, (*setting.path[:-1], setting.path[-1][:-1] or "x"), draw.choice(ODD))
        else:
            values.pop(draw.choice(list(values)), None)
    return values


def outcome(work: Any) -> str:
    """Return `taken`, or the first words of the error, which must be one of ours."""
    try:
        assert isinstance(work(), RunConfig)
    except ConfigError as error:
        text = str(error)
        assert text.strip() and "Traceback" not in text and len(text) < 8000, text[:300]
        return "refused"
    return "taken"


def test_memory_sections() -> None:
    """What is taken is a setting that `longspan.prepare` takes, also after it was written and read again."""
    draw, taken = random.Random(4), 0
    for _ in range(DICTIONARIES // 4):
        values = {**BASE, "memory": memory_drawn(draw)}
        if outcome(lambda values=values: parse_config(values)) == "taken":
            config, taken = parse_config(values), taken + 1
            made = config.memory.decided
            assert made == "auto" or isinstance(made, longspan.Memory)
            assert RunConfig.model_validate_json(config.model_dump_json()).memory.decided == made
    assert DICTIONARIES / 40 < taken < DICTIONARIES / 5, taken


def test_dictionaries() -> None:
    draw = random.Random(20261130)
    counts = Counter(outcome(lambda: parse_config(settings_drawn(draw))) for _ in range(DICTIONARIES))
    assert counts["taken"] > DICTIONARIES / 5 and counts["refused"] > DICTIONARIES / 5, counts


def text_drawn(draw: random.Random) -> bytes:
    """Return a file: settings as YAML, perhaps damaged."""
    values = settings_drawn(draw)
    try:
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError:  # a value that YAML has no word for
        text = repr(values)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(draw.choice((0, 0, 1, 2))):
        at, kind = draw.randrange(len(data) + 1), draw.randrange(6)
        if kind == 0:
            data[at:at] = draw.randbytes(3)
        elif kind == 1:
            data[at:at] = draw.choice(
                [b"\t", b": ", b"&a ", b"*a ", b"!!python/object:os.system ", b"- ", b"\r\n", b"---\n"]
            )
        elif kind == 2:
            del data[at : at + draw.randrange(1, 9)]
        elif kind == 3:
            data += data[: draw.randrange(len(data) + 1)]
        elif kind == 4:
            data = data[:at]
        else:
            data[at:at] = b"[" * draw.choice((3, 2000))
    return bytes(data)


def test_files(tmp_path: Path) -> None:
    draw, file = random.Random(7), tmp_path / "run.yaml"

    def load() -> RunConfig:
        file.write_bytes(text_drawn(draw))
        return load_config(file)

    counts = Counter(outcome(load) for _ in range(TEXTS))
    assert counts["taken"] > TEXTS / 5 and counts["refused"] > TEXTS / 5, counts


def test_plan_arguments() -> None:
    """Each run ends with a plan, or with one line of error and exit code 2."""
    draw, counts = random.Random(3), Counter[int]()
    good = {
        "--gpus": ["h200", "2xH200", "1 x h100", "2xa100-40g", "cpu"],
        "--seq-len": ["1K", "4096", "2K,4K"],
        "--host-memory": ["8GiB", "1.5TB"],
        "--gpu-memory": ["80GiB"],
        "--engine": ["fsdp2", "zero-2", "single"],
        "--optimizer": ["auto", "adamw", "adamw8bit"],
        "--lora-rank": ["4"],
        "--gpus-per-node": ["8", "2"],
    }
    odd = [
        "",
        "0",
        "-1",
        "nan",
        "1e9",
        "9" * 40,
        "2xH999",
        "x",
        "H200x2",
        "0xh200",
        "1K,,2K",
        "∞",
        "\u0000",
        "GiB",
        "1GiB ",
    ]
    for _ in range(PLANS):
        flags = {"--gpus": draw.choice(good["--gpus"]), "--seq-len": draw.choice(good["--seq-len"])}
        for name in draw.sample(list(good), draw.randrange(3)):
            flags[name] = draw.choice(good[name] if draw.random() < 0.55 else odd)
        code, out, err = run("--model", "tiny-llama", *(part for flag in flags.items() for part in flag), "--json")
        counts[code] += 1
        assert code in (0, 2) and "Traceback" not in err, (flags, err)
        assert (code == 0) == bool(out) and (code == 2) == bool(err), (flags, out, err)
    assert min(counts[0], counts[2]) > PLANS / 5, counts


def test_no_blanket_handler_makes_this_true() -> None:
    files = [
        *SOURCE.glob("config/*.py"),
        *SOURCE.glob("plan/*.py"),
        SOURCE / "cli" / "plan.py",
        SOURCE / "cli" / "app.py",
    ]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ExceptHandler):
                names = ast.unparse(node.type) if node.type else "everything"
                assert not {"everything", "Exception", "BaseException"} & set(
                    names.replace("(", "").replace(")", "").split(", ")
                ), f"{file.name}:{node.lineno} catches {names}"
    assert issubclass(ConfigError, LongspanError)

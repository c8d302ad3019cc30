"""Versions of torch, transformers and DeepSpeed that longspan does not know are refused, wherever one comes in."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

import longspan
from longspan.cli.app import main
from longspan.engines.zero import check_version
from longspan.errors import ConfigError
from longspan.integrations.deepspeed import UlyssesSPAttentionHF
from longspan.versions import SUPPORTED, refusal, versions

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def found(monkeypatch: pytest.MonkeyPatch, **others: str) -> None:
    """Let packages be of other versions than they are."""
    real = importlib.metadata.version
    monkeypatch.setattr("importlib.metadata.version", lambda name: others.get(name) or real(name))


@pytest.mark.parametrize("package", SUPPORTED)
def test_installers_are_told_the_same(package: str) -> None:
    lines = [*PYPROJECT["dependencies"], *PYPROJECT["optional-dependencies"]["deepspeed"]]
    (line,) = (line for line in lines if re.match(r"[\w-]+", line)[0] == package)  # pyright: ignore
    low, high = SUPPORTED[package]
    assert line == f"{package}>={low}" + (f",<{high}" if high else "")
    assert PYPROJECT["version"] == longspan.__version__ == versions()["longspan"]


@pytest.mark.parametrize(
    ("package", "version", "fits"),
    [
        ("torch", "2.11.0", True),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.11.0a0+gitabc123", True),
        ("torch", "3.0", True),
        ("torch", "2.10.1", False),
        ("torch", "2.9", False),
        ("transformers", "5.17", True),
        ("transformers", "5.25.0.dev0", True),
        ("transformers", "5.16.9", False),
        ("transformers", "6.0.0.dev0", False),
        ("transformers", "6", False),
        ("deepspeed", "0.19.8rc1", True),
        ("deepspeed", "0.19.10+1234abc", True),
        ("deepspeed", "0.19.7", False),
        ("deepspeed", "0.20.0", False),
    ],
)
def test_ranges(monkeypatch: pytest.MonkeyPatch, package: str, version: str, fits: bool) -> None:
    found(monkeypatch, **{package: version})
    low, high = SUPPORTED[package]
    needed = f"{package} >= {low}" + (f", < {high}" if high else "")
    assert refusal(package) == (None if fits else f"{needed}, found {version}")


def test_what_has_no_metadata_tells_its_version_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert refusal("torch") is None
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert refusal("deepspeed") == "deepspeed >= 0.19.8, < 0.20, which is not installed"
    with pytest.raises(ConfigError, match="zero engines need deepspeed .* not installed: pip install"):
        check_version()


def test_all_that_meets_transformers_looks_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`prepare`, `plan`, the Trainer, ALST and Twinkle lie in one package, which looks when it is imported."""
    found(monkeypatch, transformers="4.57.1")
    needed = "longspan needs transformers >= 5.17, < 6, found 4.57.1"
    for name in [name for name in sys.modules if name.startswith("longspan.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=needed):
        _ = longspan.prepare
    with pytest.raises(ConfigError, match=needed):
        longspan.plan("tiny-llama")
    for module in ("deepspeed", "trainer", "twinkle"):
        with pytest.raises(ConfigError, match=needed):
            importlib.import_module(f"longspan.integrations.{module}")
    for command in (["plan", "--model", "tiny-llama", "--gpus", "1xH200"], ["check", "--model", "tiny-llama"]):
        with pytest.raises(SystemExit) as exit_:
            main(command)
        assert exit_.value.code == 2 and needed in capsys.readouterr().err


def test_registration_asks_for_the_deepspeed_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, deepspeed="0.18.2")
    settings = {"core_attn_implementation": "sdpa", "sequence_parallel_size": 1, "micro_batch_size": 1}
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    assert UlyssesSPAttentionHF.register_with_transformers("tiny", **settings) is None
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    with pytest.raises(ConfigError, match=r"deepspeed >= 0.19.8, < 0.20, found 0.18.2"):
        UlyssesSPAttentionHF.register_with_transformers("tiny", **settings)

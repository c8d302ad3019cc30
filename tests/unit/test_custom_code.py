"""No code that comes with a model runs: its folder is refused, or loaded with the code of transformers alone."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import dynamic_module_utils

import longspan
from longspan.check.run import run_check
from longspan.check.settings import Settings
from longspan.cli.model import named_config
from longspan.config import ModelConfig, RunConfig
from longspan.errors import ConfigError
from longspan.integrations.deepspeed.attention import _config
from longspan.integrations.models import build_model, load_model_config
from longspan.integrations.tokenizer import byte_tokenizer, load_tokenizer
from longspan.train.export import export
from longspan.train.preflight import preflight

SOURCE = Path(longspan.__file__).parent
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
CLASSES = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"],
}


@pytest.fixture(autouse=True)
def no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on a terminal whether code may run; nobody may be asked, and nothing imported."""

    def asked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("code of a model was asked for")

    monkeypatch.setattr("builtins.input", asked)
    for module in (transformers.models.auto.configuration_auto, transformers.models.auto.auto_factory):
        monkeypatch.setattr(module, "get_class_from_dynamic_module", asked)
    monkeypatch.setattr(transformers.models.auto.tokenization_auto, "get_class_from_dynamic_module", asked)
    monkeypatch.setattr(dynamic_module_utils, "get_class_in_module", asked)


def model_folder(folder: Path, **changes: Any) -> Path:
    """Write a whole model whose config.json and tokenizer name classes of a file beside them."""
    model = build_model(ModelConfig(name="tiny-llama", init="random", overrides=SIZES), seed=0)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    for name, fields in (
        ("config.json", {"auto_map": CLASSES, **changes}),
        ("tokenizer_config.json", {"auto_map": CLASSES}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    return folder


def run_of(folder: Path, data: Path) -> RunConfig:
    data.write_text("some text")
    values = {
        "model": {"name": str(folder)},
        "data": {"files": [str(data)], "tokenizer": str(folder)},
        "sequence_length": 64,
        "max_steps": 1,
        "output_dir": str(data.parent / "run"),
    }
    return RunConfig.model_validate(values)


def adapter_on(folder: Path, out: Path) -> Path:
    """Write an adapter whose base is the model of a folder."""
    peft = pytest.importorskip("peft")
    base = build_model(ModelConfig(name=str(folder)), seed=0)
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(out)
    byte_tokenizer().save_pretrained(out)
    return out


def check(folder: Path, aside: Path) -> Any:
    config = named_config(str(folder))
    return run_check(config, Settings(str(folder), 1, seq_len=9, only=("document",)), torch.device("cpu"))


WAYS: dict[str, Callable[[Path, Path], Any]] = {
    "plan": lambda folder, aside: longspan.plan(str(folder), 1024, 1),
    "train": lambda folder, aside: preflight(run_of(folder, aside / "text.txt"), 1),
    "weights": lambda folder, aside: build_model(ModelConfig(name=str(folder)), seed=0),
    "check": check,
    "tokenizer": lambda folder, aside: load_tokenizer(str(folder)),
    "alst": lambda folder, aside: _config(folder),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_known_family_runs_the_code_of_transformers(tmp_path: Path, way: str) -> None:
    folder = model_folder(tmp_path / "model")
    assert WAYS[way](folder, tmp_path)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("tokenizer", "alst")])
def test_an_unknown_family_is_refused(tmp_path: Path, way: str) -> None:
    folder = model_folder(tmp_path / "model", model_type="evil")
    with pytest.raises(ConfigError, match="cannot load") as found:
        WAYS[way](folder, tmp_path)
    assert "trust_remote_code" in str(found.value)
    assert not (folder / "ran").exists()


def test_an_unknown_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "EvilTokenizer"}))
    with pytest.raises(ConfigError, match="data.tokenizer: cannot load"):
        load_tokenizer(str(folder))
    assert not (folder / "ran").exists()


def test_exporting_an_adapter_runs_no_code_of_its_base(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    adapter = adapter_on(folder, tmp_path / "adapter")
    (adapter / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    told = export(adapter, tmp_path / "out", merge=True)
    assert told == "model with its adapters merged" and not (folder / "ran").exists()
    assert not list((tmp_path / "out").rglob("*.py"))


def test_a_kernel_of_the_hub_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", attn_implementation="someone/kernel")
    with pytest.raises(ConfigError, match="asks for someone/kernel, an attention kernel of the Hub, which is code"):
        load_model_config(ModelConfig(name=str(folder)))


def test_every_call_that_could_run_such_code_forbids_it() -> None:
    """All calls of Auto classes say trust_remote_code=False; PEFT's, and options that hold it, are named here."""
    named = {"PeftModel.from_pretrained", "auto_class(config).from_config(config, **options)"}
    seen = 0
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("from_pretrained", "from_config"):
                continue
            seen += 1
            words = {key.arg: ast.unparse(key.value) for key in node.keywords}
            listed = ast.unparse(node.func) in named or ast.unparse(node) in named
            assert listed or words.get("trust_remote_code") == "False", f"{file}:{node.lineno}"
    assert seen >= 8
    assert "trust_remote_code" not in set(RunConfig.model_fields) | set(ModelConfig.model_fields)

"""The check passes what is exact and fails what is not: each mistake below is made on purpose."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from families import REFUSED
from launched import launched
from longspan.bench.tracked import TrackedBytes
from longspan.check.run import run_check
from longspan.check.settings import Settings
from longspan.cli.app import app
from longspan.config import AdapterConfig
from longspan.integrations.presets import preset_config
from longspan.keep import Keep, Memory
from longspan.kernels.cpu import Cpu
from longspan.mask import Mask
from pool import RunRanks

pytestmark = pytest.mark.dist

Wrong = Callable[[], contextlib.AbstractContextManager[Any]]


def summed_gradients() -> Any:
    """Give every rank the share of an engine that adds gradients up, under one that averages them."""
    from longspan.integrations.transformers import forward

    right = forward.global_loss
    return patch.object(forward, "global_loss", lambda local, shard, reduction: right(local, shard, "sum"))


def unbalanced() -> Any:
    """Leave the router's auxiliary loss out of the gradient."""
    from longspan.integrations.transformers import forward

    right = forward.balance_loss
    return patch.object(forward, "balance_loss", lambda *args: (right(*args)[0].detach(), right(*args)[1]))


def own_log_sum_exp() -> Any:
    """Give each block's backward its own output and log-sum-exp in place of the final ones."""
    right = Cpu.backward

    def backward(self: Cpu, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        *_, block, score = rest
        return right(self, dout, q, k, v, *self.forward(q, k, v, block, score), block, score)

    return patch.object(Cpu, "backward", backward)


def no_borders() -> Any:
    """Let packed documents see each other."""
    return patch("longspan.batch.Mask", lambda length, documents: Mask(length, None))


def flipped_heads() -> Any:
    """Return the heads of the exchange in the wrong order."""
    from longspan.attention.ulysses import Ulysses

    right = Ulysses.leave
    return patch.object(Ulysses, "leave", lambda self, out: right(self, out).then(lambda found: found.flip(2)))


def lost_gradient() -> Any:
    """Forget the gradient of one small parameter."""
    from longspan.integrations.transformers import Applied

    right = Applied.reduce_gradients

    def reduce(self: Applied) -> None:
        right(self)
        self.model.get_parameter("model.layers.0.input_layernorm.weight").grad = None

    return patch.object(Applied, "reduce_gradients", reduce)


def stale_eval() -> Any:
    """Report something else in evaluation."""
    from longspan.integrations.transformers import forward

    right = forward.global_loss

    def loss(local: Tensor, shard: Any, reduction: str) -> Tensor:
        found = right(local, shard, reduction)
        return found if torch.is_grad_enabled() else found * (1 + 1e-6)

    return patch.object(forward, "global_loss", loss)


def nearest_only() -> Any:
    """Let no token see another, which leaks nothing and is wrong."""
    from longspan.attention.build import Attend

    def attend(self: Attend, q: Tensor, k: Tensor, v: Tensor, schedule: Any, score: Any, sinks: Any) -> Tensor:
        return v.repeat_interleave(q.shape[2] // v.shape[2], 2)

    return patch.object(Attend, "__call__", attend)


def wrong_tiles() -> Any:
    """Lose a share of the gradient of attention in layers that run in tiles."""
    from longspan.stream.prefix import Prefix

    right: Any = Prefix.backward

    def backward(self: Any, *args: Any) -> Any:
        return right(self, *(0.99 * arg if isinstance(arg, Tensor) else arg for arg in args))

    return patch.object(Prefix, "backward", backward)


def wrong_engine() -> Any:
    """Let FSDP2 say that it adds gradients up, where it averages them."""
    from longspan.engines import FullyShardedDataParallel

    return patch.object(FullyShardedDataParallel, "grad_reduction", "sum")


def nothing() -> Any:
    """Make no mistake."""
    return contextlib.nullcontext()


def check_with(mistake: str, settings: Settings, **overrides: Any) -> dict[str, Any] | None:
    with globals()[mistake]():
        return run_check(preset_config(settings.model, **overrides), settings, torch.device("cpu"))


SMALL = Settings("tiny-llama", 2, seq_len=43)


def failed_figures(result: dict[str, Any]) -> set[str]:
    return {line.split()[0] for case in result["cases"] for line in case["why"]}


@pytest.mark.parametrize(
    "settings",
    [
        Settings("tiny-llama", 4),
        Settings("tiny-qwen2", 3, seq_len=41),
        Settings("tiny-phi3", 4, packed=True),
        Settings("tiny-moe", 4, ulysses=2, ring=2, seq_len=64),
        Settings("tiny-deepseek-v3", 2, ulysses=2, seq_len=35),
    ],
    ids=lambda settings: f"{settings.model} {settings.sp}",
)
def test_exact_models_pass(run_ranks: RunRanks, settings: Settings) -> None:
    result, *others = run_ranks(settings.sp, check_with, "nothing", settings)
    assert others == [None] * (settings.sp - 1)
    assert result["ok"], json.dumps(result, indent=1)
    assert len(result["cases"]) >= 2
    for case in result["cases"]:
        assert case["ulysses"] * case["ring"] == settings.sp
        assert case["loss_rel_err"] < 1e-12
        assert case["grad_rel_err"] < 1e-12
        assert case["eval_rel_err"] < 1e-12
        assert case["leak"] == 0
    assert json.loads(json.dumps(result)) == result


def check_under_deepspeed(mistake: str, settings: Settings) -> tuple[dict[str, Any] | None, int]:
    """Return the result, and the bytes of tensors that are there afterwards and were not before."""
    with launched():
        before = TrackedBytes().held
        return check_with(mistake, settings), TrackedBytes().held - before


@pytest.mark.parametrize("stage", [1, 3])
def test_checks_under_zero(run_ranks: RunRanks, stage: int) -> None:
    pytest.importorskip("deepspeed")
    memory = Memory(8, Keep.X_O)
    settings = replace(SMALL, dtype="bfloat16", memory=memory, engine=f"zero-{stage}", only=("packed",))
    result, left = run_ranks(2, check_under_deepspeed, "nothing", settings)[0]
    assert result["ok"], json.dumps(result, indent=1)
    assert left < 4096, "a benchmark follows, which needs the memory of its gates' models"
    wrong, _ = run_ranks(2, check_under_deepspeed, "summed_gradients", settings)[0]
    assert failed_figures(wrong) == {"grad_rel_err"}


def test_the_auxiliary_loss_of_routers_is_part_of_the_check(run_ranks: RunRanks) -> None:
    settings = Settings("tiny-moe", 2, ulysses=1, ring=2, seq_len=32)
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    assert run_ranks(2, check_with, "nothing", settings, **balanced)[0]["ok"]
    result = run_ranks(2, check_with, "unbalanced", settings, **balanced)[0]
    assert failed_figures(result) == {"grad_rel_err"}


def test_degrees_are_the_automatic_ones_and_the_others(run_ranks: RunRanks) -> None:
    settings = replace(SMALL, sp=3)
    every = run_ranks(3, check_with, "nothing", settings)[0]["cases"]
    assert [(case["ulysses"], case["ring"]) for case in every] == [(1, 3)] * 3 + [(3, 1)] * 3
    assert [case["name"] for case in every[:3]] == ["document 1x3", "padded rows 1x3", "packed 1x3"]
    one = run_ranks(3, check_with, "nothing", replace(settings, ulysses=3, packed=True))[0]["cases"]
    assert [case["name"] for case in one] == ["packed 3x1", "packed rows 3x1"]


@pytest.mark.parametrize(
    ("mistake", "degrees", "figures"),
    [
        ("summed_gradients", (2, 1), {"grad_rel_err"}),
        ("own_log_sum_exp", (1, 2), {"grad_rel_err"}),
        ("no_borders", (2, 1), {"loss_rel_err", "grad_rel_err", "leak", "eval_rel_err"}),
        ("flipped_heads", (2, 1), {"loss_rel_err", "grad_rel_err", "eval_rel_err"}),
        ("lost_gradient", (1, 2), {"grad_rel_err"}),
        ("stale_eval", (1, 2), {"eval_rel_err"}),
        ("nearest_only", (2, 1), {"loss_rel_err", "grad_rel_err", "eval_rel_err", "only"}),
    ],
)
def test_mistakes_fail(run_ranks: RunRanks, mistake: str, degrees: tuple[int, int], figures: set[str]) -> None:
    settings = replace(SMALL, ulysses=degrees[0], ring=degrees[1])
    result = run_ranks(2, check_with, mistake, settings)[0]
    assert not result["ok"]
    assert failed_figures(result) == figures


WAYS = {
    "tiles": {"memory": Memory(8, (Keep.X_O, Keep.X))},
    "engine": {"engine": "fsdp2"},
    "both": {"memory": Memory(8, (Keep.X, Keep.NONE)), "engine": "fsdp2"},
    "compiled": {"memory": Memory(8, Keep.X_O_KV, "aot_eager"), "engine": "fsdp2"},
    "kernel": {"kernel": "reference"},
}


@pytest.mark.parametrize("way", WAYS)
def test_layers_in_tiles_and_engines_are_checked(run_ranks: RunRanks, way: str) -> None:
    settings = replace(SMALL, ulysses=2, ring=1, only=("document",), **WAYS[way])
    result = run_ranks(2, check_with, "nothing", settings, timeout_s=120)[0]
    assert result["ok"], json.dumps(result, indent=1)
    assert [case["name"] for case in result["cases"]] == ["document 2x1"]
    assert result["cases"][0]["grad_rel_err"] < 1e-12
    assert result["kernel"] == WAYS[way].get("kernel", "cpu")


@pytest.mark.parametrize(
    ("mistake", "found_in"), [("wrong_tiles", {"tiles", "both"}), ("wrong_engine", {"engine", "both"})]
)
def test_their_mistakes_fail(run_ranks: RunRanks, mistake: str, found_in: set[str]) -> None:
    for way in ("tiles", "engine", "both"):
        settings = replace(SMALL, ulysses=2, ring=1, only=("document",), **WAYS[way])
        result = run_ranks(2, check_with, mistake, settings)[0]
        assert result["ok"] is (way not in found_in)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_adapters_are_checked_in_their_own_type(run_ranks: RunRanks, dtype: str) -> None:
    pytest.importorskip("peft")
    adapter = AdapterConfig(kind="lora", rank=4)
    settings = replace(SMALL, ulysses=2, ring=1, only=("packed",), dtype=dtype, adapter=adapter, **WAYS["both"])
    result = run_ranks(2, check_with, "nothing", settings)[0]
    assert result["ok"], json.dumps(result, indent=1)
    (case,) = result["cases"]
    assert (result["adapted"], "lora" in case["worst_parameter"]) == ("lora 4", True)
    assert case["grad_rel_err"] < 1e-12 or 1e-3 < case["baseline_grad_rel_err"] < 0.1
    wrong = run_ranks(2, check_with, "wrong_tiles" if dtype == "float64" else "wrong_engine", settings)[0]
    assert failed_figures(wrong) == {"grad_rel_err"}


def test_samples_are_chosen_by_name(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match="no sample named 'pages'; take some of document, padded rows, packed"):
        run_ranks(2, check_with, "nothing", replace(SMALL, only=("pages",)))


def test_bfloat16_is_held_against_the_plain_models_own_error(run_ranks: RunRanks) -> None:
    settings = replace(SMALL, dtype="bfloat16", seq_len=150)
    result = run_ranks(2, check_with, "nothing", settings)[0]
    assert result["ok"], json.dumps(result, indent=1)
    for case in result["cases"]:
        assert 1e-5 < case["baseline_loss_rel_err"] < 1e-2
        assert 1e-3 < case["baseline_grad_rel_err"] < 0.1
        assert case["leak"] == 0
    for mistake in ("summed_gradients", "no_borders"):
        assert not run_ranks(2, check_with, mistake, settings)[0]["ok"]


def test_the_command_prints_json_alone(tmp_path: Path) -> None:
    preset_config("tiny-llama", num_attention_heads=8).save_pretrained(tmp_path)
    command = [
        sys.executable,
        "-m",
        "longspan",
        "check",
        "--model",
        str(tmp_path),
        "--sp",
        "2",
        "--ring",
        "2",
        "--json",
    ]
    done = subprocess.run([*command, "--seq-len", "33"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] is True
    keys = {"name", "ulysses", "ring", "loss_rel_err", "grad_rel_err", "leak", "eval_rel_err"}
    assert all(keys <= set(case) for case in result["cases"])
    assert {(case["ulysses"], case["ring"]) for case in result["cases"]} == {(1, 2)}


@pytest.fixture
def mixing(tmp_path: Path) -> Path:
    """The folder of a model that mixes tokens beside its attention."""
    config = REFUSED["Falcon-H1"].config()
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_refused_model_is_one_line(mixing: Path) -> None:
    command = [sys.executable, "-m", "longspan", "check", "--model", str(mixing), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Refused: {REFUSED['Falcon-H1'].says}")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout) == {"ok": False, "cases": [], "refused": done.stderr[9:-1]}


def test_a_row_for_the_table(tmp_path: Path) -> None:
    preset_config("tiny-llama", num_attention_heads=4, num_key_value_heads=1).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "longspan", "check", "--row", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"| Llama | `{tmp_path}`{' | exact' * 6} |\n"


def test_the_row_of_a_refused_model(mixing: Path) -> None:
    command = [sys.executable, "-m", "longspan", "check", "--row", "--model", str(mixing), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    result = json.loads(done.stdout)
    assert (done.returncode, result["ok"]) == (1, False)
    assert result["row"].startswith(f"| FalconH1 | `{mixing}` | refused ({REFUSED['Falcon-H1'].says}")
    assert result["row"].endswith(" | refused | refused | refused | refused | refused |")
    assert all(cell["said"] == "refused" for cell in result["cells"].values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sp 0", "--sp must be at least 1, got 0"),
        ("--sp 4 --ulysses -2", "--ulysses must be at least 1, got -2"),
        ("--sp 4 --ring 0", "--ring must be at least 1, got 0"),
        ("--sp 4 --ulysses 3", "--ulysses x --ring must make --sp"),
        ("--sp 4 --ulysses 2 --ring 4", "--ulysses x --ring must make --sp"),
        ("--seq-len 1.5K", "--seq-len 1.5K is not a size"),
        ("--row --sp 3", "--row chooses degrees, rows and type itself"),
        ("--device tpu", "--device must be auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_flags_start_nothing(flags: str, message: str) -> None:
    done = CliRunner().invoke(app, ["check", "--model", "tiny-llama", *flags.split()])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("ok", [True, False])
def test_the_table_and_the_exit_code_say_what_was_found(ok: bool) -> None:
    case = {"name": "packed 1x2", "ulysses": 1, "ring": 2, "loss_rel_err": 1e-16, "grad_rel_err": None, "leak": 7}
    case |= {"eval_rel_err": 0.0, "worst_parameter": "norm.weight", "why": [] if ok else ["leak 7 exceeds 0"], "ok": ok}
    facts = {"model": "m", "layers": 2, "seq_len": 9, "dtype": "float64", "device": "cpu", "kernel": "cpu"}
    result = {"ok": ok, "cases": [case], "narrowed": {"vocab_size": 512}, "adapted": "lora 8", **facts}
    with patch("longspan.cli.check.start", return_value=result) as start:
        table = CliRunner().invoke(app, ["check", "--model", "m", "--lora-rank", "8"])
        assert start.call_args.args[0].settings.adapter == AdapterConfig(kind="lora", rank=8)
        printed = CliRunner().invoke(app, ["check", "--model", "m", "--json"])
    assert table.exit_code == printed.exit_code == (0 if ok else 1)
    assert json.loads(printed.stdout) == result
    assert "packed 1x2" in table.stdout
    assert "vocab_size cut to 512, lora 8" in table.stdout
    assert ("leak 7 exceeds 0 (worst gradient: norm.weight)" in table.stdout) is not ok
    assert table.stdout.strip().endswith("OK" if ok else "FAILED")

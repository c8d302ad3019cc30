"""`longspan.plan` and `longspan plan`: what they return, and what they say when something is wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from transformers import T5Config

import longspan
from longspan.cli import main
from longspan.errors import ConfigError, ModelError, TopologyError
from longspan.integrations.presets import PRESETS, preset_config
from longspan.keep import Keep, Memory
from longspan.plan.library import find_machine, parse_gpus
from longspan.plan.machine import GIB
from longspan.plan.plan import Plan, describe


def run(*arguments: str) -> tuple[int, str, str]:
    """Run the command line here; return exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    return int(left.value.code or 0), out.getvalue(), err.getvalue()


def test_package_and_function() -> None:
    """It can be called in a fresh process, before and after its modules are imported, and loads nothing heavy."""
    code = (
        "import sys, longspan\n"
        "assert callable(longspan.plan)\n"
        "from longspan.plan.plan import Plan\n"
        "import longspan.plan.plan\n"
        "assert longspan.plan.plan.Plan is Plan and callable(longspan.plan)\n"
        "assert not {'transformers', 'torch'} & set(sys.modules), 'planning loaded a framework'\n"
        "print(longspan.plan('tiny-llama', 4096, 1).seq_len)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "4096"), done.stderr


def test_the_fastest_number_of_gpus_on_a_row() -> None:
    """Short rows are best left whole; those that one GPU cannot hold are divided, and the longest over all GPUs."""
    asked: dict[str, Any] = {"world_size": 16, "host_memory_gib": 1800}
    short, long = (longspan.plan("llama-8b", tokens, **asked) for tokens in (16_384, 1 << 20))
    assert (short.sequence_parallel_size, short.data_parallel_size) == (1, 16)
    assert (long.sequence_parallel_size, long.data_parallel_size) == (16, 1)
    together = longspan.plan("llama-8b", 16_384, sequence_parallel_size=16, **asked)
    assert together.data_parallel_size == 1
    rates = [made.tokens_per_s or 0 for made in (short, together)]
    assert rates[0] > 1.05 * rates[1]
    assert rates[0] == pytest.approx(16 * 16_384 / (short.step_s or 0))
    assert any("16 data-parallel replicas of 1 GPU, 262,144 tokens a step" in reason for reason in short.reasons)
    longest = longspan.plan("llama-8b", **asked)
    assert longest.sequence_parallel_size == 16
    assert longest.max_seq_len == short.max_seq_len == together.max_seq_len
    with pytest.raises(ConfigError, match="3 GPUs on a row do not divide 16: take one of 16, 8, 4, 2, 1"):
        longspan.plan("llama-8b", 16_384, sequence_parallel_size=3, **asked)


@pytest.mark.parametrize("model", ["llama-8b", preset_config("llama-8b")], ids=["name", "config"])
def test_plan(model: Any) -> None:
    made = longspan.plan(model, seq_len=131_072, world_size=2, host_memory_gib=256)
    assert isinstance(made, Plan)
    assert (made.seq_len, made.ulysses_degree, made.ring_degree) == (131_072, 2, 1)
    assert made.max_seq_len is not None and made.max_seq_len >= 2 << 20
    assert made.memory is not None and made.memory.compile == "inductor"
    assert {Keep.PRODUCTS, Keep.X_O_KV} <= set(made.memory.keep)
    assert made.host_bytes["kept by layers"] > 0  # what travels while layers compute is not computed again
    text = made.explain()
    for part in ("131,072 tokens", "x+O+KV", "GiB per GPU", "kept by layers", "seconds per step", "attention", "MFU"):
        assert part in text
    assert "\n" not in made.summary()


def test_longest_needs_more_than_shorter() -> None:
    longest = longspan.plan("llama-1b", None, 1, 80, 200)
    assert longest.seq_len == longest.max_seq_len
    short = longspan.plan("llama-1b", 65_536, 1, 80, 200)
    assert short.max_seq_len == longest.max_seq_len
    assert (short.step_s or 0) < (longest.step_s or 0)
    with pytest.raises(ConfigError, match=rf"do not fit.*Use rows of at most {longest.max_seq_len:,}"):
        longspan.plan("llama-1b", (longest.seq_len or 0) + 1024, 1, 80, 200)


def test_zero_engines() -> None:
    """A stage divides what it divides: each needs less of a GPU than the one before it."""
    arguments = ("--model", "llama-1b", "--gpus", "8xH200", "--seq-len", "64K", "--json")
    held = []
    for stage in range(4):
        code, out, err = run(*arguments, "--engine", f"zero-{stage}")
        assert (code, err) == (0, ""), err
        made = json.loads(out)
        assert (made["engine"], made["optimizer"]) == (f"zero-{stage}", "adamw")
        held.append(made["gpu_bytes"])
    whole = held[0]["optimizer"]
    assert [round(whole / sizes["optimizer"]) for sizes in held] == [1, 8, 8, 8]
    assert [round(whole / sizes["parameters"]) for sizes in held] == [6, 6, 6, 48]
    code, _, err = run(*arguments, "--engine", "zero-2", "--optimizer", "adamw8bit")
    assert code == 2 and "serves optimizer adamw, not 'adamw8bit'" in err
    code, _, err = run("--model", "llama-8b", "--gpus", "1xH200", "--seq-len", "64K", "--engine", "zero-1")
    assert code == 2 and "do not fit" in err and "optimizer" not in err.split("Use ")[1]


def test_json() -> None:
    code, out, err = run(
        "--model", "llama-8b", "--gpus", "2xH200", "--host-memory", "256GiB", "--seq-len", "768K", "--json"
    )
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert {
        "max_seq_len", "seq_len", "degrees", "level", "gpu_bytes", "host_bytes", "step_s", "tokens_per_s", "reasons",
    } <= set(made)  # fmt: skip
    assert made["seq_len"] == 768 << 10
    assert made["degrees"] == {"sequence_parallel": 2, "ulysses": 2, "ring": 1, "data_parallel": 1}
    assert made["level"] == "1F"
    assert all(
        isinstance(size, int) and size > 0 for size in [*made["gpu_bytes"].values(), *made["host_bytes"].values()]
    )
    assert sum(made["gpu_bytes"].values()) <= find_machine("h200").memory_bytes
    assert made["host_bytes"]["kept by layers"] > GIB
    assert made["step_s"] == pytest.approx(sum(made["seconds"].values()))
    assert made["tokens_per_s"] == pytest.approx((768 << 10) / made["step_s"])
    assert made["reasons"] and all(isinstance(reason, str) for reason in made["reasons"])
    assert len(made["memory"]["keep"]) == 32


def test_text() -> None:
    code, out, _ = run("--model", "tiny-llama", "--gpus", "H100", "--seq-len", "8K")
    assert code == 0
    assert "longest row that fits" in out and "rows of 8,192 tokens" in out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--model": "lama-8b"}, "Did you mean the preset llama-8b?"),
        ({"--gpus": "2xH300"}, "no figures for a machine 'h300'"),
        ({"--gpus": "two"}, "no figures for a machine 'two'"),
        ({"--gpus": "0xH200"}, "2xH200"),
        ({"--gpus": "12xH200"}, "12 GPUs do not fill nodes of 8"),
        ({"--gpus-per-node": "0"}, "0 per node"),
        ({"--host-memory": "lots"}, "--host-memory: An amount of memory is given as 64GiB, 1.9TB"),
        ({"--host-memory": "1.9"}, "--host-memory 1.9 is 2 bytes"),
        ({"--gpu-memory": "80"}, "--gpu-memory 80 is 80 bytes"),
        ({"--seq-len": "1X"}, "--seq-len 1X"),
        ({"--seq-len": "0"}, "at least one token"),
        ({"--engine": "zero9"}, "Unknown engine 'zero9'"),
        ({"--optimizer": "adam8bit"}, "Did you mean adamw8bit?"),
        ({"--seq-len": "64M"}, "Use rows of at most"),
        ({"--model": "llama-70b"}, "optimizer adamw-bf16-sr"),
    ],
)  # fmt: skip
def test_errors(changes: dict[str, str], said: str) -> None:
    flags = {"--model": "llama-8b", "--gpus": "8xH200", "--host-memory": "256GiB"} | changes
    code, out, err = run(*(part for flag in flags.items() for part in flag))
    assert code == 2
    assert out == ""
    assert err.count("Error: ") == 1 and "Traceback" not in err
    assert said in err


def test_errors_of_the_function() -> None:
    with pytest.raises(ConfigError, match="at least one GPU"):
        longspan.plan("tiny-llama", 1024, 0)
    with pytest.raises(TypeError):
        longspan.plan()  # pyright: ignore[reportCallIssue]
    with pytest.raises(ModelError, match="transformers has no language model for T5Config"):
        longspan.plan(T5Config(), 1024, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_planned(name: str) -> None:
    try:
        made = longspan.plan(name, 8192, 8, 139, 560, optimizer="adamw-bf16-sr")
    except TopologyError as error:
        assert "heads" in str(error)  # tiny models have fewer heads than ranks
        return
    assert made.seq_len == 8192
    assert (made.mfu or 0) > 0


def test_one_process_steps_inside_backward() -> None:
    made = longspan.plan("llama-8b", 262_144, 1, 79, 1700, gpu="h100")
    assert (made.engine, made.optimizer) == ("single", "adamw-host")
    assert any("inside backward" in reason for reason in made.reasons)
    assert made.host_bytes["optimizer"] == pytest.approx(12 * 8_030_261_248)


def test_sizes_and_machines() -> None:
    assert parse_gpus("2xH200") == (2, find_machine("h200"))
    assert parse_gpus("B200") == (1, find_machine("b200"))
    assert find_machine("A100") is find_machine("a100-80g")
    assert find_machine("h200").rate("cudnn+aten-flash").name == "cudnn"
    assert find_machine("h200").rate("auto").name == "fa4"
    assert find_machine("h200").rate("unknown").backward_tflops == 326


def test_describe() -> None:
    assert describe(Memory()) == "every layer keeps graph"
    many = Memory(1024, (Keep.X_O, Keep.OUT) * 3, None)
    assert describe(many) == "layers keep x+O (3), O (3), in tiles of 1,024 tokens"
    few = Memory(2048, (*[Keep.X_O_KV] * 2, Keep.GRAPH), "inductor")
    assert describe(few) == "layers keep x+O+KV (2), graph (1), in tiles of 2,048 tokens, compiled"

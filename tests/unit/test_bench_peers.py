"""Other systems are run in processes of their own, and what they print becomes rows."""

from __future__ import annotations

import ast
import sys
import time
from pathlib import Path

import pytest

from longspan.bench.peers import PEERS, Peer, command, finished, rows_of, run_peer
from longspan.bench.settings import Asked, Setting, Work

ASKED = Asked(Work("tiny-llama", 1, seed=3), (Setting("auto", 64), Setting("8/x/-", 64), Setting("auto", 128)), steps=2)
HERE = Peer("here", "json", "here.py")
FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"


def test_one_that_is_missing_says_so(tmp_path: Path) -> None:
    peer = Peer("elsewhere", "no_such_module", "elsewhere.py")
    assert run_peer(peer, tmp_path, ASKED, None) == [
        {"system": "elsewhere", "state": "not installed: no module no_such_module"}
    ]


def test_it_is_asked_for_the_same_work() -> None:
    asked = command(HERE, Path("peers"), ASKED, ["--liger"])
    assert asked[asked.index("peers/here.py") :] == [
        "peers/here.py", "--model", "tiny-llama", "--steps", "2", "--seed", "3", "--liger", "--seq-len", "64", "128",
    ]  # fmt: skip


def test_the_last_row_of_a_length_counts() -> None:
    printed = 'hello\nROW {"tokens": 64, "step_s": 2.0}\nROW {"tokens": 64, "step_s": 1.0}\nROW {"tokens": 128}\n'
    assert rows_of(printed, HERE) == [
        {"system": "here", "state": "done", "tokens": 64, "step_s": 1.0},
        {"system": "here", "state": "done", "tokens": 128},
    ]


@pytest.mark.parametrize(("ending", "state"), [("", None), ("raise SystemExit(3)", "failed with exit code 1")])
def test_what_it_had_is_kept(tmp_path: Path, ending: str, state: str | None) -> None:
    (tmp_path / "here.py").write_text(f"print('ROW {{\"tokens\": 64}}', flush=True)\n{ending}\n")
    first, *rest = run_peer(HERE, tmp_path, ASKED, None)
    assert first == {"system": "here", "state": "done", "tokens": 64}
    assert len(rest) == (state is not None)
    assert all(row["state"].startswith(str(state)) for row in rest)


def test_at_the_limit_all_its_processes_end() -> None:
    sleeper = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys; print('ROW', flush=True); "
        f"subprocess.run([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
    )
    started = time.monotonic()
    assert finished([sys.executable, "-c", code], 5) == ("ROW\n", None)
    assert time.monotonic() - started < 40


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_script_that_uses_it(peer: Peer) -> None:
    tree = ast.parse((FOLDER / peer.script).read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert peer.module in modules

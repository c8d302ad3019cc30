"""SIGTERM to one process reaches those that it has started, and those that are still starting."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from longspan.bench.peers import finished
from longspan.cli.stopping import Leaving, passing_on, was_told

LISTEN = """
import signal, sys, time
from pathlib import Path
from longspan.cli.stopping import hear

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as what it is forked from has it
hear(Path(sys.argv[1]))
print("hears", flush=True)
time.sleep(30)
"""


def listener(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", LISTEN, str(folder)], stdout=subprocess.PIPE, text=True)


def test_processes_are_told_now_and_later(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with passing_on(tmp_path):
        first, gone = listener(tmp_path), listener(tmp_path)
        for process in (first, gone):
            assert process.stdout is not None and process.stdout.readline() == "hears\n"
        gone.kill()
        gone.wait()
        assert first.poll() is None and not was_told(tmp_path)
        signal.raise_signal(signal.SIGTERM)  # to this process, which goes on
        assert was_told(tmp_path)
        assert first.wait(timeout=10) == listener(tmp_path).wait(timeout=10) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("processes", [2, 4], ids=["while they start", "at work"])
def test_a_command_ends_what_it_has_started(tmp_path: Path, processes: int) -> None:
    """Its processes would go on for as long as their work takes, on the GPUs that they hold."""
    command = [sys.executable, "-m", "longspan", "bench", "all", "--model", "tiny-llama", "--seq-len", "128"]
    command += ["--steps", "99999", "--sp", "2", "--memory", "16/x+O/-", "--device", "cpu", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    # at first one that keeps account, one that others are forked from, and these
    while len(started := parent.children(recursive=True)) < processes:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and err.splitlines()[-1] == "Error: Stopped by SIGTERM; its processes have ended."
    assert not psutil.wait_procs(started, timeout=10)[1]


def test_leaving_is_over_with_its_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(SystemExit, match="Stopped by SIGTERM"))
        stack.enter_context(Leaving())
        stack.callback(signal.raise_signal, signal.SIGTERM)  # cuts nothing off
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_peer_is_ended_too() -> None:
    """With what it has started, whatever cuts the wait for it off."""
    words = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '50'])"]
    started: list[psutil.Process] = []

    def wait_until_both_run(process: subprocess.Popen[str], **options: Any) -> Any:
        parent = psutil.Process(process.pid)
        while not (children := parent.children()):
            time.sleep(0.05)
        started.extend([parent, *children])
        raise SystemExit

    with patch.object(subprocess.Popen, "communicate", wait_until_both_run), pytest.raises(SystemExit):
        finished(words, None)
    assert len(started) == 2 and not psutil.wait_procs(started, timeout=10)[1]


def test_leaving_waits_for_what_must_not_be_cut_off() -> None:
    done: list[int] = []
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(SystemExit, match="Stopped by SIGTERM"))
        stack.enter_context(stack.enter_context(Leaving()).held())
        signal.raise_signal(signal.SIGTERM)
        done.append(1)
    assert done == [1]


def test_only_the_main_thread_hears(tmp_path: Path) -> None:
    said: list[bool] = []

    def elsewhere() -> None:
        with passing_on(tmp_path):
            said.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert said == [True]

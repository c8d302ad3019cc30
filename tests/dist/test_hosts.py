"""Two hosts train together over TCP, and notice when their link is cut: network namespaces stand for hosts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
HOSTS = (f"lsp-{os.getpid()}-a", f"lsp-{os.getpid()}-b")  # so that other checkouts may have hosts too
ADDRESSES, LINKS = ("10.213.7.1", "10.213.7.2"), ("lsp-eth-a", "lsp-eth-b")
LIMIT_S = 12.0
"""Of a step; the first may take three times as long, importing and compiling included."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Have two hosts with a cable between them."""
    try:
        _remove()
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", LINKS[0], "netns", HOSTS[0], "type", "veth", "peer", "name", LINKS[1], "netns", HOSTS[1])
        for host, address, link in zip(HOSTS, ADDRESSES, LINKS, strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", host, "link", "set", link, "up")
            ip("-n", host, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove()
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', None) or error}")
    yield
    _remove()


def _remove() -> None:
    for host in HOSTS:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "delete", host)


def start(host: int, *flags: str) -> subprocess.Popen[str]:
    """Start a host's torchrun."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": LINKS[host],
    }
    rendezvous = ("--master-addr", ADDRESSES[0], "--master-port", "29517", "--node-rank", str(host))
    return subprocess.Popen(
        [
            *("ip", "netns", "exec", HOSTS[host], sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "1", *rendezvous, "-m", "longspan", "train", *flags),
        ],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def settings(folder: Path, **changes: Any) -> Path:
    """Write a run whose rows two processes share."""
    text = folder / "some.txt"
    text.write_text("two hosts share each row of this text\n" * 40)
    values = {
        "model": {"name": "tiny-llama", "init": "random"},
        "data": {"files": [str(text)], "long_documents": "split"},
        "sequence_length": 512,
        "sequence_parallel_size": 2,
        "max_steps": 4,
        "save": {"final": False},
        "logging": {"to": []},
        "output_dir": str(folder / "out"),
        **changes,
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps(values))  # which is YAML too
    return file


def losses(folder: Path) -> list[float]:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_two_hosts_compute_what_one_does(hosts: None, tmp_path: Path) -> None:
    file = settings(tmp_path)
    both = [start(host, str(file)) for host in (0, 1)]
    said = [process.communicate(timeout=150)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "ulysses" in said[0]
    found = losses(tmp_path)
    alone = ("--sequence-parallel-size", "1", "--nproc", "1", "--overwrite")
    command = [sys.executable, "-m", "longspan", "train", str(file), *alone]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=120)
    assert found == pytest.approx(losses(tmp_path), rel=1e-5)
    assert len(found) == 4


def test_a_link_that_is_cut_is_noticed(hosts: None, tmp_path: Path) -> None:
    """No packet says so: both hosts' watchdogs do, and say where they stood."""
    file = settings(tmp_path, max_steps=1_000_000, faults={"timeout_minutes": LIMIT_S / 60})
    both = [start(host, str(file)) for host in (0, 1)]
    metrics, until = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert time.monotonic() < until and all(process.poll() is None for process in both)
        time.sleep(0.2)
    time.sleep(LIMIT_S / 3)  # each host leaves word every tenth of the limit: let both have done so since a step
    ip("-n", HOSTS[0], "link", "set", LINKS[0], "down")
    cut = time.monotonic()
    reports = [tmp_path / "out" / f"watchdog-rank{rank}.txt" for rank in (0, 1)]
    try:
        while not all(report.exists() and "step" in report.read_text() for report in reports):
            assert time.monotonic() - cut < 5 * LIMIT_S, [report.exists() for report in reports]
            time.sleep(0.2)
        said = both[0].communicate(timeout=60)[0]
        assert both[0].returncode == 1
    finally:
        for process in both:
            process.kill()
    assert "process 0 has not ended a step" in said  # also on the terminal
    for report in reports:
        text = report.read_text()
        assert any(phase in text for phase in ("forward", "backward", "reducing gradients", "optimizer")), text
    assert "process 1: step" in reports[0].read_text() and "has not reported for" in reports[0].read_text()
    assert "the first host is down, or the link to it" in reports[1].read_text()

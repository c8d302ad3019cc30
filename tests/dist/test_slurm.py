"""A job on a real Slurm of two nodes, both on this host: started, told that its time is up, requeued, and gone on."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ports import free_ports

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in DAEMONS),
        reason=f"Slurm is not installed here: {', '.join(DAEMONS)} (on Debian, slurm-wlm and munge)",
    ),
]

ROOT = Path(__file__).parents[2]
CONFIG = """
ClusterName=longspan
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
MailProg=/bin/true
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} Gres=gpu:1
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES
"""
"""Nodes' names are addresses, so that nobody has to look them up; a GPU is a device that every host has."""


def until(what: Callable[[], object], name: str, limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, f"{name} has not come in {limit_s} s"
        time.sleep(0.3)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Start a cluster; return what runs its commands."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "127.0.0.1", "127.0.0.2", "bin"):
        (folder / name).mkdir(mode=0o755)
    (folder / "key-file").write_bytes(os.urandom(128))
    (folder / "key-file").chmod(0o400)
    host, user = socket.gethostname().split(".")[0], getpass.getuser()
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, user=user, folder=folder, ports=free_ports(3)))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    (folder / "bin" / "longspan").write_text(f'#!/bin/sh\nexec {sys.executable} -m longspan "$@"\n')
    (folder / "bin" / "longspan").chmod(0o755)
    environment = os.environ | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}:/usr/sbin",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    munge = [f"--{name}={folder / name}" for name in ("socket", "key-file", "log-file", "pid-file", "seed-file")]
    commands = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", f"127.0.0.{node}"] for node in (1, 2)]

    def run(*command: str) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with open(folder / "daemons.log", "wb") as log:
        daemons = []
        try:
            for command in commands:
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                if command[0] == "munged":
                    until((folder / "socket").exists, "munged", 20)
            until(lambda: run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "the cluster", 60)
            yield run
            run("scancel", "--user", user)
            until(lambda: not run("squeue", "-h"), "the end of all jobs", 60)
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()


def test_a_job_goes_on_where_its_time_was_up(slurm: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("two nodes share each row of this text\n" * 40)
    file, out, log = tmp_path / "run.yaml", tmp_path / "out", tmp_path / "log"
    settings = {
        "model": {"name": "tiny-llama", "init": "random"},
        "data": {"files": [str(tmp_path / "some.txt")], "long_documents": "split"},
        "sequence_length": 64,
        "sequence_parallel_size": 2,
        "max_steps": 100_000,
        "save": {"final": False},
        "logging": {"to": []},
        "output_dir": str(out),
    }
    file.write_text(json.dumps(settings))  # which is YAML too
    smaller = ("--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1", f"--output={log}")
    script = str(ROOT / "examples" / "slurm" / "train.sbatch")
    job = slurm("sbatch", "--parsable", *smaller, script, str(file)).strip()

    def state() -> str:
        return slurm("scontrol", "show", "job", job)

    def said() -> str:
        return log.read_text() if log.exists() else ""

    until(lambda: "step " in said() or "JobState=FAILED" in state(), "the first step")
    slurm("scancel", "--signal=USR1", "--batch", job)  # as Slurm does before the time is up
    until(lambda: "JobState=PENDING Reason=BeginTime" in state() or "JobState=FAILED" in state(), "the requeued job")
    stopped = re.search(r"stopped by SIGTERM after step (\d+), which is saved", said())
    assert stopped is not None and "Restarts=1" in state() and "on 2 cpu processes" in said(), said()
    last = int(stopped[1]) + 2
    file.write_text(json.dumps(settings | {"max_steps": last}))
    # Slurm would wait for two minutes; a node refuses a job that begins in the very second in which it was ended there
    time.sleep(2)
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: "JobState=COMPLETED" in state() or "JobState=FAILED" in state(), "the end")
    assert f"going on after step {last - 2}\n" in said() and "JobState=COMPLETED" in state(), said()
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, last + 1))

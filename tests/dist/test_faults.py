"""What happens to a run of two processes when one of them is killed or hangs."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from killing import Ended, Kill, kills, nursery
from runs import config_of, result

pytestmark = pytest.mark.dist

KILLS = int(os.environ.get("LONGSPAN_TEST_KILLS", "6"))
SEED = int(os.environ.get("LONGSPAN_TEST_SEED", "1"))
ROOT = Path(__file__).parents[2]
CHAIN = 3
"""Kills of one run before it may end."""

Attempt = Callable[..., Ended]


@pytest.fixture(scope="module")
def attempt() -> Iterator[Attempt]:
    with nursery() as make:
        yield make


def config(folder: Path, **changes: Any) -> Any:
    return config_of(str(folder / "out"), **{"max_steps": 8, **changes})


@pytest.fixture(scope="module")
def whole(attempt: Attempt, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, float]:
    """What an undisturbed run records, and how long it takes."""
    folder = tmp_path_factory.mktemp("whole")
    ended = attempt(config(folder))
    assert ended.codes == (0, 0), ended.told
    return result(str(folder / "out")), ended.seconds


def test_killed_runs_end_as_if_they_had_not_been(attempt: Attempt, whole: Any, tmp_path: Path) -> None:
    """Each run is killed a few times, gone on with each time, and then left alone."""
    expected, seconds = whole
    planned, wheres, runs = kills(SEED, seconds / 4), list[str](), 0
    while len(wheres) < KILLS:
        runs, folder = runs + 1, tmp_path / str(runs)
        folder.mkdir()
        changes = {"save": {"every": 2, "keep": 2, "asynchronous": runs % 4 != 0}, "resume": True}
        for kill in itertools.islice(planned, min(CHAIN, KILLS - len(wheres))):
            ended = attempt(config(folder, **changes), kill)
            if ended.where is None:  # it came to its end before
                assert ended.codes == (0, 0), ended.told
                break
            wheres.append(ended.where)
        ended = attempt(config(folder, **changes))
        assert ended.codes == (0, 0), ended.told
        assert result(str(folder / "out")) == expected
        assert runs < 2 * KILLS, "the kills come too late"
    inside = Counter(filter(None, wheres))
    print(f"{len(wheres)} killed in {runs} runs, {inside.total()} of them in a save: {dict(inside)}")
    assert inside.total() >= 0.3 * KILLS


def test_a_process_whose_peer_is_killed_says_so(attempt: Attempt, tmp_path: Path) -> None:
    """It ends by itself, with a message in place of a traceback."""
    ended = attempt(config(tmp_path, max_steps=100_000), Kill(1, after_s=0.3), patience_s=30)
    assert ended.codes == (1, -9), ended.told
    assert "another process is gone, or cannot be reached" in ended.told
    assert "In step" in ended.told and "--resume" in ended.told
    assert "Traceback" not in ended.told and "rank 0: TrainingError" in ended.told


def die_while_building(rank: int, config: Any) -> None:
    """Have the second process die before there is a model."""
    from longspan.train import loop

    if rank == 1:
        loop.build_model = lambda *args: os.kill(os.getpid(), 9)


def test_a_process_whose_peer_dies_early_says_so(attempt: Attempt, tmp_path: Path) -> None:
    ended = attempt(config(tmp_path), act="test_faults:die_while_building")
    assert ended.codes == (1, -9), ended.told
    assert "In the beginning, building the model: another process is gone" in ended.told
    assert "Traceback" not in ended.told


def hang_in_backward(rank: int, config: Any) -> None:
    """Have the second process sleep in the backward pass of its third step, and the first one notice later."""
    from longspan.engines import FullyShardedDataParallel as Sharded
    from longspan.train.pulse import Pulse

    beat = Pulse.beat

    def late(self: Pulse) -> None:
        beat(self)
        self.beat_s += 0.5

    if rank == 0:
        Pulse.beat = late
    plain, calls = Sharded.backward, 0

    def backward(self: Any, loss: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5 and rank == 1:  # of two micro-batches each
            time.sleep(10_000)
        plain(self, loss)

    Sharded.backward = backward


def test_a_step_that_hangs_is_ended(attempt: Attempt, tmp_path: Path) -> None:
    """Both processes end within the limit, and say where each of them was."""
    limit_s = 4.0
    faults = {"timeout_minutes": limit_s / 60}
    ended = attempt(config(tmp_path, faults=faults), act="test_faults:hang_in_backward")
    assert ended.codes == (1, 1), ended.told
    for rank in (0, 1):
        report = (tmp_path / "out" / f"watchdog-rank{rank}.txt").read_text()
        assert report in ended.told
        assert re.match(rf"longspan: process {rank} has not ended a step for [3-9] s: step 3, backward, for", report)
        assert "raise faults.timeout_minutes" in report and "--resume" in report
        assert "process 0: step 3, backward\nprocess 1: step 3, backward" in report
        assert "thread MainThread:" in report
        assert ("time.sleep(10_000)" in report) == (rank == 1)


def hang_with_the_interpreter(rank: int, config: Any) -> None:
    """Have the first process sleep in foreign code that lets no other thread run Python."""
    from longspan.train import loop

    def step(*args: Any) -> Any:
        ctypes.PyDLL(None).sleep(10_000)

    if rank == 0:
        loop.run_step = step


def test_a_process_that_holds_the_interpreter_is_ended(attempt: Attempt, tmp_path: Path) -> None:
    """Its own threads cannot do it; the other process is ended by its own watchdog."""
    ended = attempt(config(tmp_path, faults={"timeout_minutes": 1 / 60}), act="test_faults:hang_with_the_interpreter")
    assert ended.codes == (1, 1), ended.told
    assert "Timeout (" in ended.told and "in step\n" in ended.told
    assert re.search("process 0: (step 1|the beginning), [a-z ]+, and has not reported for", ended.told)


def stop_while_saving(rank: int, config: Any) -> None:
    """Have SIGTERM come while a checkpoint is being written slowly, and only then."""
    import signal

    from longspan.train import loop
    from longspan.train.writing import Writing

    write, take = Writing._write, loop.run_step

    def slow(self: Writing) -> None:
        time.sleep(1.0)
        write(self)

    def step(trainee: Any, data: Any, number: int, *rest: Any) -> Any:
        if number == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(trainee, data, number, *rest)

    Writing._write, loop.run_step = slow, step


def test_sigterm_waits_for_what_is_being_written(attempt: Attempt, whole: Any, tmp_path: Path) -> None:
    ended = attempt(config(tmp_path), act="test_faults:stop_while_saving")
    assert ended.codes == (0, 0), ended.told
    assert "stopped by SIGTERM after step 3" in ended.told
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]
    ended = attempt(config(tmp_path, resume=True))
    assert "going on after step 3" in ended.told
    assert result(str(tmp_path / "out")) == whole[0]


def count_steps_while_saving(rank: int, config: Any) -> None:
    """Print, of each checkpoint, how many steps were begun while it was being written."""
    from longspan.train import loop
    from longspan.train.checkpoints import Checkpoints
    from longspan.train.writing import Writing

    write, take, settle, begun = Writing._write, loop.run_step, Checkpoints.settle, [0]

    def slow(self: Writing) -> None:
        time.sleep(0.5)
        write(self)

    def step(*args: Any) -> Any:
        begun[0] += 1
        return take(*args)

    def counted(self: Checkpoints) -> None:
        if rank == 0 and self._flight is not None:
            print(f"settling {self._flight.folder.name} in step {begun[0]}")
        settle(self)

    Writing._write, loop.run_step, Checkpoints.settle = slow, step, counted


@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_while_a_checkpoint_is_written(
    attempt: Attempt, whole: Any, tmp_path: Path, asynchronous: bool
) -> None:
    """One at a time: the next save waits for the one before, the end of the run for the last."""
    save = {"every": 4, "asynchronous": asynchronous}
    ended = attempt(config(tmp_path, save=save), act="test_faults:count_steps_while_saving")
    assert ended.codes == (0, 0), ended.told
    found = [line for line in ended.told.splitlines() if line.startswith("settling")]
    steps = [int(line.rpartition(" ")[2]) for line in found]
    assert [line.split()[1] for line in found] == ["step-00000004", "step-00000008"]
    assert steps[0] >= 6 if asynchronous else steps[0] == 5  # what has been written is settled after the next step
    assert steps[1] == 8
    assert result(str(tmp_path / "out")) == whole[0]
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000008")
    ended = attempt(config(tmp_path, save=save, resume=True))
    assert "going on after step 4" in ended.told, "what was written later is of step 4 all the same"
    assert result(str(tmp_path / "out")) == whole[0]


def full_disk(rank: int, config: Any) -> bool:
    """Train in one process on a small file system of its own that fills up; then make room and go on."""
    import torch
    import torch.distributed as dist

    from longspan.errors import TrainingError
    from longspan.train import loop
    from longspan.train.progress import Progress
    from runs import corpus

    dist.destroy_process_group()
    if rank:
        return True
    folder = Path(config.output_dir).parent
    assert ctypes.CDLL(None).unshare(0x20000) == 0  # mounts of its own
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(folder)], check=True)
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(1_400_000))
    save = {"every": 1, "keep": 2, "final": False}

    def train(**changes: Any) -> None:
        alone = {"engine": "single", "sequence_parallel_size": 1, "gradient_accumulation_steps": 1}
        made = config_of(str(folder / "out"), **alone, save=save, **changes)
        loop.train(made, corpus(), torch.device("cpu"), Progress(sys.stdout, made.max_steps))

    try:
        train()
    except TrainingError as error:
        print(f"full: {error}")
    ballast.unlink()
    train(resume=True)
    print("ended", sorted(path.name for path in (folder / "out" / "checkpoints").iterdir()), flush=True)
    return True


def mounts() -> bool:
    """Whether this user may have a file system of its own."""
    command = "mount -t tmpfs -o size=64k tmpfs /mnt"
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, check=False).returncode
    )


@pytest.mark.skipif(not mounts(), reason="needs the right to mount a tmpfs (root, unshare -m)")
def test_a_disk_that_is_full(attempt: Attempt, tmp_path: Path) -> None:
    ended = attempt(config(tmp_path), act="test_faults:full_disk")
    assert ended.codes == (0, 0), ended.told
    assert re.search(r"full: Cannot write checkpoint .*step-0000000[23]: process 0 says .*No space left", ended.told), (
        ended.told
    )
    assert re.search(r"going on after step [12]\n", ended.told)
    assert "ended ['step-00000005', 'step-00000006']" in ended.told


@pytest.mark.slow
def test_torchrun_starts_a_killed_run_again(tmp_path: Path) -> None:
    """It goes on from its last checkpoint without being told, and ends with the losses of one that was left alone."""
    (tmp_path / "a.txt").write_text("def double(x):\n    return 2 * x\n" * 30)
    values = {
        "model": {
            "name": "tiny-llama",
            "init": "random",
            "overrides": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 257},
        },
        "data": {"files": str(tmp_path / "a.txt"), "long_documents": "split"},
        "sequence_length": 64,
        "sequence_parallel_size": 2,
        "max_steps": 8,
        "save": {"every": 2},
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    found = {}
    for name, restarts in (("left alone", 0), ("killed", 1)):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({**values, "output_dir": str(tmp_path / name)}))
        program = [str(ROOT / "tests" / "dist" / "once_killed.py")] if restarts else ["-m", "longspan"]
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        done = subprocess.run(
            [*run, "--max-restarts", str(restarts), *program, "train", str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("going on after step 4" in done.stdout) == bool(restarts), done.stdout
        found[name] = result(str(tmp_path / name))
    assert found["killed"] == found["left alone"]


def timeouts(limit_s: float) -> list[float]:
    """Return how long collectives of a mesh's axis and of all processes wait."""
    import torch
    import torch.distributed as dist

    from longspan.mesh import build_mesh
    from longspan.plan.degrees import Degrees
    from longspan.train.watchdog import wait_longer

    mesh = build_mesh(torch.arange(4).view(2, 2), Degrees(2, 1, ""), "cpu")
    wait_longer(limit_s)
    groups = [group for group in (mesh.ulysses.group, dist.group.WORLD) if group is not None]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_collectives_wait_longer_than_the_watchdog(run_ranks: Any) -> None:
    """The default group is given its time when it is made."""
    for axis, everyone in run_ranks(4, timeouts, 7000.0):
        assert axis > 3 * 7000 > everyone

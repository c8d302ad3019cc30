"""`memory="auto"`: decisions are made per length, alike on all ranks, and whatever is decided is exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import longspan
from longspan.errors import ConfigError
from longspan.integrations.transformers.automatic import Automatic, Place
from longspan.keep import Keep, Memory
from longspan.plan.library import find_machine
from longspan.plan.machine import GIB, KernelRate
from longspan.plan.memory import HOST_RESERVE_BYTES, HOST_RESERVE_SHARE, RESERVE_BYTES, RESERVE_SHARE
from longspan.plan.plan import Plan
from longspan.plan.setup import Optimizer
from models import Rows, build, one_device
from pool import RunRanks
from test_parity import Errors, compare, exact, worst
from test_stream import wide

pytestmark = pytest.mark.dist

LONG, MIDDLE, SHORT = Rows([[2100, 900, 1000]]), Rows([[311, 150, 60]]), Rows([[40, 23]])


def on(handle: Any, device_bytes: int, host_bytes: int = 0, backend: str | None = None) -> Automatic:
    """Let a handle decide as on GPUs of so many bytes."""
    machine = replace(find_machine("h200"), kernels=(KernelRate("cpu", 0.001, 0.001),))  # running it again is the worst
    place = Place(machine, device_bytes, host_bytes, handle.mesh.world.size)
    optimizer = Optimizer("free", 0, 1e-9, 0, 0, 0)  # so that what layers keep is most of what there is
    automatic = replace(handle.automatic, place=place, backend=backend, optimizer=optimizer, plans={}, tasks={})
    handle.automatic = automatic
    return automatic


def automatic_of(handle: Any) -> Automatic:
    assert isinstance(handle.automatic, Automatic)
    return handle.automatic


def decisions(handle: Any, rows: int, tokens: int) -> Iterator[tuple[int, Memory]]:
    """Yield a decision of each kind that GPUs of less and less memory lead to, and the most memory that does."""
    seen = set()
    size = 8.0
    while True:
        slots = (1 << 28) * (handle.mesh.ulysses.size > 1)
        device_bytes = round((RESERVE_BYTES + slots + size * (1 << 20)) / (1 - RESERVE_SHARE))
        try:
            memory = on(handle, device_bytes).plan(handle.model, rows, tokens).memory
        except ConfigError:
            return
        assert memory is not None
        if levels(memory) not in seen:
            seen.add(levels(memory))
            yield device_bytes, memory
        size *= 0.98


def levels(memory: Memory) -> frozenset[Keep]:
    return frozenset((memory.keep,) if isinstance(memory.keep, Keep) else memory.keep)


def every_level(family: str, ulysses: int) -> tuple[Errors, list[str]]:
    """Train one step under each decision that some amount of memory leads to; return the worst errors."""
    model = build(family, layers=8)
    with wide():
        loss, wanted, _ = one_device(model, [MIDDLE])
        handle = longspan.prepare(model, ulysses, ulysses_degree=ulysses)
        found: Errors = {}
        names = []
        tokens = sum(MIDDLE.documents[0])
        for device_bytes, memory in list(decisions(handle, 1, tokens)):
            automatic = on(handle, device_bytes)
            model.zero_grad()
            out = model(**handle.shard(MIDDLE.batch()))
            assert handle.plan.memory == memory == handle.memory
            assert handle.plan is automatic.plan(model, 1, tokens)
            out.loss.backward()
            handle.reduce_gradients()
            assert abs(float(out.loss) - loss) < 1e-10
            errors = compare(model, wanted)
            found = {name: max(error, found.get(name, 0.0)) for name, error in errors.items()}
            names.append(" ".join(sorted(levels(memory))))
    return found, names


@pytest.mark.parametrize(("family", "ulysses"), [("llama", 1), ("llama-tied", 2)])
def test_every_decision_is_exact(run_ranks: RunRanks, family: str, ulysses: int) -> None:
    results = run_ranks(ulysses, every_level, family, ulysses)
    errors, names = [r[0] for r in results], [r[1] for r in results]
    assert all(n == names[0] for n in names)
    kept = {keep for name in names[0] for keep in name.split()}
    assert kept >= {"x+O+KV", "x+O", "O", "none"}, names[0]
    assert exact(errors), worst(errors)


def lengths(ulysses: int) -> list[tuple[int | None, int]]:
    """Shard rows of several lengths back and forth; return tile and decisions made."""
    handle = longspan.prepare(build("llama"), ulysses)
    automatic = on(handle, 100 * GIB, backend="aot_eager")
    found = []
    for tokens in (64, 8192, 64, 5000, 8192):
        batch = {"input_ids": torch.ones(1, tokens).long(), "labels": torch.ones(1, tokens).long()}
        shard = handle.shard(batch)["longspan"]
        assert handle.memory_of(shard) == automatic.plan(handle.model, 1, tokens).memory
        found.append((shard.tile_tokens, len(automatic.plans)))
    return found


def test_a_decision_per_length(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, lengths, 2):
        assert [count for _, count in found] == [1, 2, 2, 3, 3]
        assert found[0] == (found[2][0], 1)
        assert found[1][0] == 4096  # a round shard is one tile
        assert found[3][0] == 2048 or found[3][0] == 1024  # another is cut into powers of two


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "rows of" in line]


def test_a_new_level_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    handle = longspan.prepare(build("llama"), 1)
    on(handle, 100 * GIB, backend="aot_eager")
    for tokens in (5000, 5000, 5002, 8192):
        handle.shard({"input_ids": torch.ones(1, tokens).long()} | {"labels": torch.ones(1, tokens).long()})
    assert len(automatic_of(handle).plans) == 3
    assert len(told(capsys)) == len({p.memory for p in automatic_of(handle).plans.values()}) == 2
    assert handle.plan.seq_len == 8192
    assert handle.plan.reasons[0].startswith("4 query heads")


def test_on_a_cpu_layers_run_whole(capsys: pytest.CaptureFixture[str]) -> None:
    handle = longspan.prepare(build("llama"), 1)
    part = handle.shard(SHORT.batch())
    assert handle.memory == Memory()
    assert part["longspan"].tile_tokens is None
    assert (handle.plan.level, handle.plan.seq_len) == ("graph", 63)
    assert told(capsys) == []


def test_on_a_small_cpu_they_do_not() -> None:
    handle = longspan.prepare(build("llama"), 1)
    machine = find_machine("cpu")
    sizes = []
    for mib in (1024, 40, 20):
        place = Place(machine, round((HOST_RESERVE_BYTES + mib * (1 << 20)) / (1 - HOST_RESERVE_SHARE)), 0, 1)
        handle.automatic = replace(automatic_of(handle), place=place, plans={}, tasks={})
        memory = automatic_of(handle).plan(handle.model, 1, 4096).memory
        assert memory is not None and memory.compile is None
        sizes.append(memory.streams)
    assert sizes[0] is False
    assert sizes[-1] is True


def test_what_does_not_fit_is_refused() -> None:
    handle = longspan.prepare(build("llama"), 1)
    on(handle, 3 * GIB)
    with pytest.raises(ConfigError, match=r"do not fit.*GiB of a GPU.*memory=longspan.Memory"):
        handle.shard(LONG.batch())


def test_a_hand_made_decision_overrides() -> None:
    handle = longspan.prepare(build("llama"), 1, memory=Memory(16, Keep.X))
    assert handle.automatic is None
    assert handle.shard(SHORT.batch())["longspan"].tile_tokens == 16
    assert handle.memory == Memory(16, Keep.X)


def test_a_part_that_was_cut_before_sharding() -> None:
    """Tiles of a part stay as they were cut, though the decision for its length has changed since."""
    handle = longspan.prepare(build("llama"), 1)
    on(handle, 100 * GIB, backend="aot_eager")
    part = handle.shard({"input_ids": torch.ones(1, 2048).long(), "labels": torch.ones(1, 2048).long()})
    assert part["longspan"].tile_tokens == 2048
    smaller: Plan = replace(handle.plan, memory=Memory(1024, Keep.X_O))
    with patch.object(Automatic, "plan", return_value=smaller):
        assert handle.memory_of(part["longspan"]) == Memory(2048, Keep.X_O)
        unstreamed = replace(part["longspan"], tile_tokens=None)
        assert handle.memory_of(unstreamed) == Memory()


def agreed() -> tuple[int, int, int]:
    rank = torch.distributed.get_rank()
    with patch("psutil.virtual_memory") as seen:
        seen.return_value.total = seen.return_value.available = (8 - rank) * GIB
        place = longspan.prepare(build("llama"), 2).automatic.place  # type: ignore[union-attr]
    return place.device_bytes, place.host_bytes, place.node_ranks


def test_ranks_agree_on_the_smallest(run_ranks: RunRanks) -> None:
    assert run_ranks(2, agreed) == [(7 * GIB // 2, 7 * GIB, 2)] * 2


def test_optimizer_is_counted() -> None:
    """Weights of fp64 here: 32 bytes each with gradients and two moments; what is told otherwise is believed."""
    handle = longspan.prepare(build("llama"), 1)
    automatic = replace(on(handle, 100 * GIB), optimizer=None)
    made = automatic.plan(handle.model, 1, 4096)
    count = sum(p.numel() for p in handle.model.parameters())
    assert made.gpu_bytes["parameters"] == made.gpu_bytes["optimizer"] // 2 == 8 * count


@pytest.mark.parametrize(("engine", "parameters", "states"), [("zero-1", 2, 12 / 4), ("zero-3", 2 / 4, 12 / 4)])
def test_an_engine_says_what_it_holds(engine: str, parameters: float, states: float) -> None:
    """DeepSpeed's bfloat16 stages hold more than the model shows, and divide it by stage."""
    handle = longspan.prepare(build("llama"), 1)
    automatic = replace(
        on(handle, 100 * GIB), optimizer=None, mesh=replace(handle.mesh, world=replace(handle.mesh.world, size=4))
    )
    handle.automatic = automatic
    automatic.plan(handle.model, 1, 4096)
    handle.held_by(engine, Optimizer.under_zero(int(engine[-1]), 2))
    assert not automatic.plans
    made = automatic.plan(handle.model, 1, 4096)
    count = sum(p.numel() for p in handle.model.parameters())
    assert made.engine == engine
    assert made.gpu_bytes["parameters"] == pytest.approx(parameters * count, abs=1)
    assert made.gpu_bytes["optimizer"] == pytest.approx(states * count, abs=1)


@pytest.mark.parametrize(("replicas", "sharded", "rebuilds"), [(1, True, True), (2, True, False), (2, False, True)])
def test_replicas_that_share_parameters_do_not_rebuild(replicas: int, sharded: bool, rebuilds: bool) -> None:
    """Their rows may have other lengths, and so other decisions; gathering parameters is for all ranks or none."""
    handle = longspan.prepare(build("llama"), 1)
    mesh = replace(handle.mesh, data=replace(handle.mesh.data, size=replicas))
    task = replace(automatic_of(handle), mesh=mesh)._task(handle.model, sharded)
    assert task.rebuilds is rebuilds
    assert task.engine == ("fsdp2" if sharded else "ddp")

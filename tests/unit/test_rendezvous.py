"""Processes meet in a part of a store that earlier ones have not written to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from longspan.cli.rendezvous import meet, shared_store
from longspan.errors import TrainingError

SOON = timedelta(seconds=20)


def generation(store: Store, ranks: tuple[int, ...], world: int = 3) -> list[Store]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: meet(store, rank, world, SOON), ranks))


def test_each_start_has_a_place_of_its_own() -> None:
    """Whoever comes first, and whatever those before have left."""
    store = HashStore()
    for number, ranks in enumerate([(0, 1, 2), (2, 1, 0), (1, 0, 2)]):
        met = generation(store, ranks)
        assert not any(part.check(["address"]) for part in met), "what an earlier start has left is seen"
        met[0].set("address", str(number))
        assert [part.get("address") for part in met] == [str(number).encode()] * 3


def test_a_process_that_died_before_it_was_answered_is_not_waited_for() -> None:
    store = HashStore()
    store.set("longspan/hello/1", "who is gone")
    first, second = generation(store, (0, 1), world=2)
    first.set("x", "y")
    assert second.get("x") == b"y"


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(TrainingError, match=r"Processes \[1, 2\] have not come within 0:00:00.2"):
        meet(HashStore(), 0, 3, timedelta(seconds=0.2))


def test_without_a_store_of_torchruns_the_environment_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert shared_store(SOON) == {}

"""Let the processes that torchrun started meet where none of an earlier start has left anything."""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from longspan.errors import TrainingError

_LOOK_S = 0.05


def shared_store(timeout: timedelta) -> dict[str, Any]:
    """Return what `init_process_group` is to be told; nothing where the environment says it all.

    torchrun keeps one store for all starts of a run, with the addresses of processes that are gone
    (https://github.com/pytorch/pytorch/issues/135712), so a process that is started again may try to reach them. Its
    count of starts is no way to tell them apart, since each host has its own.
    """
    store = _store_of_all_starts(timeout)
    if store is None:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return {"store": meet(store, rank, world_size, timeout), "rank": rank, "world_size": world_size}


def run_name(timeout: timedelta) -> tuple[str, bool]:
    """Return a name for what torchrun runs, the same in all of its starts, and whether this call has made it up.

    It is made up each time where no store outlasts a start. Not torchrun's own id, which a user may give to many runs,
    nor its count of starts; see `shared_store`.
    """
    own, store = secrets.token_hex(4), _store_of_all_starts(timeout)
    name = own if store is None else store.compare_set("longspan/run", "", own).decode()
    return name, name == own


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a part of a store that is new, and the same for all processes that are alive.

    Each process says hello under a name that only it has; the first one answers with a name for all, again and again
    until each of them has confirmed it. An answer to a process that is gone reaches nobody.

    Raises:
        TrainingError: some process does not come.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"longspan/hello/{rank}", own)
        name = store.get(f"longspan/answer/{own}").decode()
        store.set(f"longspan/here/{name}/{rank}", "")
        return PrefixStore(name, store)
    missing, deadline = set(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"longspan/here/{own}/{other}"]):
                missing.remove(other)
            elif store.check([f"longspan/hello/{other}"]):
                store.set(f"longspan/answer/{store.get(f'longspan/hello/{other}').decode()}", own)
        if missing and time.monotonic() > deadline:
            raise TrainingError(
                f"Processes {sorted(missing)} have not come within {timeout}: see what their hosts say."
            )
        time.sleep(_LOOK_S if missing else 0)
    return PrefixStore(own, store)


def _store_of_all_starts(timeout: timedelta) -> Store | None:
    """Connect to the store that torchrun keeps; None where it keeps none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timeout)

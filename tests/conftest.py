"""What every test needs: GPU tests leave quietly where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longspan.plan import library
from pool import RunRanks, open_pool

torch.set_num_threads(1)
library.OWN_FILE = Path(os.devnull)  # machines of whoever runs the tests must not change plans


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device{'s' * (needed > 1)}, found {count}"))


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RunRanks]:
    """Run a function on `world` processes: run_ranks(world, fn, *args) -> what each rank returned."""
    with open_pool() as run:
        yield run

"""What every test needs: GPU tests leave quietly where there is no GPU, and of large matrices a cover of pairs runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from cover import beyond
from longspan.plan import library
from pool import RunRanks, open_pool

torch.set_num_threads(1)
with suppress(ImportError):  # tests on GPUs need no hypothesis
    import hypothesis

    hypothesis.settings.register_profile("busy", deadline=None)  # other work on the machine makes examples slow
    hypothesis.settings.load_profile("busy")
library.OWN_FILE = Path(os.devnull)  # machines of whoever runs the tests must not change plans


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cells", action="store_true", help="run every cell of tests marked `matrix`, not a cover")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_name = config.option.keyword or any("::" in argument for argument in config.args)
    if not config.getoption("--all-cells") and not by_name:
        left_out = set(beyond(items))
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
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

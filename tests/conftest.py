"""What every test needs: GPU tests leave quietly where there is no GPU."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count()
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device{'s' * (needed > 1)}, found {count}"))

"""Processes that settle differently all raise, in place of waiting for each other later."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.errors import LongspanError
from longspan.kernels.cpu import Cpu
from models import build
from pool import RunRanks

pytestmark = pytest.mark.dist

DIFFERENCES = {
    "layers": "Processes differ in layers: process 0 has 2 with",
    "degrees": "Processes differ in degrees: process 0 has ulysses 2 x ring 1; process 1 has ulysses 1 x ring 2.",
    "kernels": "Processes differ in kernels: process 0 has cpu; process 1 has reference.",
    "refusals": "Processes differ in kv_exchange: process 0 has auto; process 1 has kernel 'cpu': not here.",
}


def without_bottom_right(self: Cpu, request: Any) -> str | None:
    return "not here" if request.bottom_right else None


def without_memory(self: Cpu, request: Any) -> str | None:
    raise torch.OutOfMemoryError("no room")


def told(difference: str) -> tuple[str, str]:
    """Prepare with a difference in the second process; return the error there is."""
    second = dist.get_rank() == 1
    settings: dict[str, Any] = {}
    with ExitStack() as stack:
        if second and difference == "degrees":
            settings["ring_degree"] = 2
        if second and difference == "kernels":
            settings["kernel"] = "reference"
        if second and difference == "refusals":
            stack.enter_context(patch.object(Cpu, "refuses", without_bottom_right))
        if second and difference == "kernel":
            settings["kernel"] = "fa4"
        if second and difference == "raw":
            stack.enter_context(patch.object(Cpu, "refuses", without_memory))
        model = build("qwen3" if second and difference == "layers" else "llama")
        if second and difference == "dropout":
            model.config.attention_dropout = 0.1
        try:
            longspan.prepare(model, 2, **settings)
        except (LongspanError, RuntimeError) as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_difference_is_named_on_all(run_ranks: RunRanks, difference: str) -> None:
    for kind, text in run_ranks(2, told, difference):
        assert kind == "TopologyError"
        assert text.startswith(DIFFERENCES[difference])


@pytest.mark.parametrize(
    ("difference", "kind", "before"),
    [("kernel", "KernelError", ""), ("dropout", "ModelError", ""), ("raw", "OutOfMemoryError", "OutOfMemoryError: ")],
)
def test_where_one_fails_the_others_say_so(run_ranks: RunRanks, difference: str, kind: str, before: str) -> None:
    first, second = run_ranks(2, told, difference)
    assert second[0] == kind
    assert first == ("TopologyError", f"Process 1 cannot prepare the model, so process 0 does not: {before}{second[1]}")

"""`longspan.attend` refuses operands of which it would leave something out."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from longspan import Layout, Mask, Schedule, attend
from longspan.errors import BatchError, KernelError, TopologyError
from longspan.mesh import Axis, Mesh

TWO = Mesh(ring=Axis(2, 0, (0, 1)), sequence=Axis(2, 0, (0, 1)))


def tensor(rows: int = 1, tokens: int = 8, heads: int = 2, dim: int = 4, **options: Any) -> torch.Tensor:
    return torch.rand(rows, tokens, heads, dim, **options)


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"q": tensor(tokens=4)}, BatchError, r"s = 8 tokens, .* got \(1, 4, 2, 4\)"),
        ({"k": tensor(tokens=9)}, BatchError, r"\(1, 9, 2, 4\)"),
        ({"v": tensor(rows=2)}, BatchError, "B = 1 rows"),
        ({"v": tensor(heads=1)}, BatchError, "attend takes q"),
        ({"k": tensor(dim=6)}, BatchError, "attend takes q"),
        ({"q": torch.rand(1, 8, 8)}, BatchError, r"\(1, 8, 8\)"),
        ({"k": tensor(heads=3), "v": tensor(heads=3)}, TopologyError, "2 query heads cannot share 3 KV heads"),
        ({"k": tensor(dtype=torch.float64)}, BatchError, "one dtype"),
        ({"mask": Mask(8, ((0,), (0, 3)))}, BatchError, "B = 2 rows"),
        ({"mesh": TWO}, BatchError, "s = 4 tokens"),
        ({"layout": Layout(8, ring=2)}, TopologyError, "ring 2 x ulysses 1, the mesh has 1 x 1"),
        ({"layout": Layout(9)}, BatchError, "s = 9 tokens"),
        ({"schedule": Schedule.of(Mask(8, ((0, 3),)), Layout(8), 0)}, BatchError, "made for another mask"),
        ({"schedule": Schedule.of(Mask(9), Layout(9), 0)}, BatchError, "s = 9 tokens"),
        (
            {"schedule": Schedule.of(Mask(8), Layout(8, tile=2), 0), "layout": Layout(8)},
            BatchError,
            "another mask, layout",
        ),
        ({"kernel": "eager"}, KernelError, "all queries by all keys"),
        ({"kernel": "nonsense"}, KernelError, "no attention kernel 'nonsense'"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], error: type[Exception], told: str) -> None:
    call = {"q": tensor(), "k": tensor(), "v": tensor(), "mask": Mask(8), "mesh": Mesh(), **changed}
    with pytest.raises(error, match=told):
        attend(**call)


def test_the_scale_defaults_to_that_of_the_head_dim() -> None:
    q, k, v = tensor(), tensor(), tensor()
    told = attend(q, k, v, Mask(8), Mesh(), scale=0.5)
    assert torch.equal(attend(q, k, v, Mask(8), Mesh()), told)
    assert not torch.equal(attend(q, k, v, Mask(8), Mesh(), scale=1.0), told)


def test_a_schedule_can_be_made_once_for_many_calls() -> None:
    q, k, v = tensor(), tensor(), tensor()
    mask = Mask(8, ((0, 3),))
    schedule = Schedule.of(mask, Layout(8), 0)
    told = attend(q, k, v, mask, Mesh())
    with patch.object(Schedule, "of", side_effect=AssertionError("made again")):
        assert torch.equal(attend(q, k, v, mask, Mesh(), schedule=schedule), told)
        assert torch.equal(attend(q, k, v, Mask(8, ((0, 3),)), Mesh(), schedule=schedule, layout=Layout(8)), told)

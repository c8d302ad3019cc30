"""States of 8 bits are saved as numbers, from which the same bytes come."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from longspan.optim import build_optimizer, low_bit
from longspan.optim.saved import empty_state, own_state, saved_state

pytest.importorskip("torchao")


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def stepped(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer after steps; some blocks never had a gradient, and a bias has no blocks."""
    torch.manual_seed(3)
    model = nn.Linear(96, 128, dtype=dtype)
    optimizer = build_optimizer("adamw8bit", model, lr=1e-2)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * torch.randn_like(parameter).exp() ** 3
            parameter.grad.view(-1)[:512] = 0
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("piece", [256, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bytes_come_of_what_is_saved(dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit, "_PIECE_ELEMENTS", piece)
    model, optimizer = stepped(dtype)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        saved = {key: low_bit.unpacked(value) for key, value in saved_state(state).items()}
        assert {k: v.shape for k, v in empty_state(optimizer, parameter).items()} == {
            k: v.shape for k, v in saved.items()
        }
        assert all(torch.equal(saved[key], low_bit.unpacked(state[key])) for key in ("exp_avg", "exp_avg_sq"))
        back: dict[str, Any] = own_state(optimizer, parameter, copy.deepcopy(saved))
        for key in ("exp_avg", "exp_avg_sq"):
            if parameter.dim() > 1:
                assert low_bit.is_packed(back[key]) and saved[key].dtype == torch.float32
                assert torch.equal(back[key].codes, state[key].codes) and torch.equal(back[key].scale, state[key].scale)
                assert back[key].signed == state[key].signed
            else:
                assert torch.equal(back[key], state[key]) and not low_bit.is_packed(back[key])


def test_without_scales_blocks_are_packed_as_torchao_packs_them() -> None:
    model, optimizer = stepped(torch.float32)
    weight = next(model.parameters())
    saved = {key: low_bit.unpacked(value) for key, value in saved_state(optimizer.state[weight]).items()}
    anew: dict[str, Any] = own_state(optimizer, weight, {k: v for k, v in saved.items() if "scale" not in k})
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        expected: Any = low_bit.buffer(optimizer, weight, signed)
        expected.copy_(saved[key])
        assert torch.equal(anew[key].codes, expected.codes) and torch.equal(anew[key].scale, expected.scale)


def test_other_optimizers_are_saved_as_they_are() -> None:
    model = nn.Linear(96, 128)
    for kind in ("adamw", "adamw-host"):
        optimizer = build_optimizer(kind, model, lr=1e-2)
        model(torch.ones(96)).sum().backward()
        optimizer.step()
        parameter, state = next(model.parameters()), optimizer.state_dict()["state"][0]
        assert saved_state(state) == state == own_state(optimizer, parameter, state)
        assert empty_state(optimizer, parameter).keys() == state.keys()

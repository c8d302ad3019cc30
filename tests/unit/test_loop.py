"""What the loop refuses before it moves a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.train.room import check_memory


def test_weights_that_a_gpu_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False), "norm": nn.BatchNorm1d(3)}
    )
    model["head"].weight = model["embed"].weight  # tied: counted once
    needed_bytes = 4 * (10 * 4 + 4 * 3) + 8  # and the norm's four vectors and its counter
    gpu = torch.device("cuda", 0)
    free_bytes = needed_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 10**9) if device == gpu else None)
    check_memory(model, gpu)
    free_bytes -= 1
    with pytest.raises(ConfigError, match=r"need 216 bytes, but cuda:0 has 215 bytes free.*model\.dtype"):
        check_memory(model, gpu)
    check_memory(model, torch.device("cpu"))

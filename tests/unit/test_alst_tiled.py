"""Tiled computation by the names and signatures of DeepSpeed's ALST: gradients of the whole computation, in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.attention.call import Window
from longspan.errors import BatchError, ConfigError, ModelError, TrainingError
from longspan.integrations import deepspeed as alst
from longspan.integrations.deepspeed.masks import Deferred
from longspan.integrations.transformers.attention import Refused

REL = 1e-12
VOCAB = 11


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def weights(mlp: Mlp) -> list[Tensor]:
    return [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]


def gradients(module: nn.Module, x: Tensor, run: Any) -> list[Tensor]:
    """Loss, gradients of x and of the parameters."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    loss = run(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= REL * other.norm()


def hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("params", ["weights", "none"])
@pytest.mark.parametrize("shards", [1, 3, 50])
@pytest.mark.parametrize("shape", [(1, 7, 6), (3, 7, 6), (8, 6)])
def test_tiled_mlp(shape: tuple[int, ...], shards: int, params: str) -> None:
    mlp = Mlp()
    named = weights(mlp) if params == "weights" else None
    expected = gradients(mlp, hidden(*shape), lambda x: mlp(x).square().sum())
    same(
        gradients(
            mlp, hidden(*shape), lambda x: alst.TiledMLP.apply(Mlp.forward, mlp, x, shards, named).square().sum()
        ),
        expected,
    )
    same(
        gradients(mlp, hidden(*shape), lambda x: alst.AutogradComputeMLP.apply(Mlp.forward, mlp, x).square().sum()),
        expected,
    )


def test_inputs_and_gradients_that_are_not_contiguous() -> None:
    mlp = Mlp()

    def run(x: Tensor, apply: Any) -> Tensor:
        return (apply(x.transpose(0, 1)).transpose(1, 2) * torch.arange(7.0)).sum()

    expected = gradients(mlp, hidden(7, 3, 6), lambda x: run(x, mlp))
    same(
        gradients(mlp, hidden(7, 3, 6), lambda x: run(x, lambda t: alst.TiledMLP.apply(Mlp.forward, mlp, t, 4, None))),
        expected,
    )


class Head(nn.Module):
    """A head, and a loss of its logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(6, VOCAB).double()

    def loss(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        losses = F.cross_entropy(self.lm_head(x).view(-1, VOCAB), y.view(-1), reduction="none")
        return (losses if mask is None else losses * mask).sum()

    def mean_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(x).view(-1, VOCAB), y.view(-1))


def targets(rows: int = 2, ignored: int = 5) -> Tensor:
    y = torch.randint(VOCAB, (rows, 8), generator=torch.Generator().manual_seed(2))
    y.view(-1)[:ignored] = -100
    return y


def tiled_loss(head: Head, x: Tensor, shards: int, reduction: str = "sum", **changed: Any) -> Tensor:
    given = {
        "fn": Head.loss,
        "y": targets(),
        "mask": None,
        "params": [head.lm_head.weight, head.lm_head.bias],
    } | changed
    return alst.TiledFusedLogitsLoss.apply(
        given["fn"], head, x, given["y"], given["mask"], shards, given["params"], reduction
    )


@pytest.mark.parametrize("params", ["named", "none"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shards", [1, 3, 40])
def test_the_incoming_gradient_scales_all_gradients_of_a_tiled_loss(shards: int, masked: bool, params: str) -> None:
    head = Head()
    mask = (torch.arange(16).view(2, 8) % 3 > 0).double() if masked else None
    flat = None if mask is None else mask.view(-1)
    expected = gradients(head, hidden(2, 8, 6), lambda x: head.loss(x, targets(), flat) / 64 * 3)
    changed: dict[str, Any] = {} if params == "named" else {"params": None}
    same(
        gradients(head, hidden(2, 8, 6), lambda x: tiled_loss(head, x, shards, mask=mask, **changed) / 64 * 3), expected
    )


def test_the_mean_over_tiles_counts_those_with_a_target() -> None:
    head = Head()  # two tiles of 4 tokens: the first has no target
    y = targets(rows=1, ignored=4)
    expected = gradients(head, hidden(1, 8, 6), lambda x: head.mean_loss(x, y))
    same(gradients(head, hidden(1, 8, 6), lambda x: tiled_loss(head, x, 2, "mean", fn=Head.mean_loss, y=y)), expected)
    y = targets(rows=1, ignored=0)
    expected = gradients(head, hidden(1, 8, 6), lambda x: head.mean_loss(x, y))
    same(gradients(head, hidden(1, 8, 6), lambda x: tiled_loss(head, x, 99, "mean", fn=Head.mean_loss, y=y)), expected)
    nothing = gradients(
        head, hidden(1, 8, 6), lambda x: tiled_loss(head, x, 2, "mean", fn=Head.mean_loss, y=y * 0 - 100)
    )
    assert all(not part.any() for part in nothing)


def test_a_frozen_trunk_and_no_gradients_at_all() -> None:
    head, x = Head(), hidden(2, 8, 6)
    expected = gradients(head, x, lambda t: head.loss(t, targets()))[2:]
    head.zero_grad()
    tiled_loss(head, x, 3).backward()
    same([head.lm_head.weight.grad, head.lm_head.bias.grad], expected)  # type: ignore[list-item]
    with torch.no_grad():
        assert not tiled_loss(head, x, 3).requires_grad


@pytest.mark.parametrize("params", ["weights", "none"])
@pytest.mark.parametrize("shards", [1, 4, 30])
@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_any_computation_tile_by_tile(reduction: str | None, shards: int, params: str) -> None:
    mlp, scale = Mlp(), hidden(3, 7, 6).exp()

    def fn(x: Tensor, scale: Tensor, power: int, module: Mlp) -> Tensor:
        return module(x).square() * scale**power

    def reduced(out: Tensor) -> Tensor:
        return (out * out).sum() if reduction is None else out.mean() if reduction == "mean" else out.sum()

    expected = gradients(mlp, hidden(3, 7, 6), lambda x: reduced(fn(x, scale, 2, mlp)))

    def run(x: Tensor) -> Tensor:
        out = alst.sequence_tiled_compute(
            fn=fn,
            seqlen=7,
            shards=shards,
            kwargs_to_shard={"x": x, "scale": scale},
            kwargs_to_pass={"power": 2, "module": mlp},
            grad_requiring_tensor_key="x",
            compute_params=[*weights(mlp), *(p for n, p in mlp.named_parameters() if "bias" in n)]
            if params == "weights"
            else None,
            output_reduction=reduction,
        )
        return reduced(out) if reduction is None else out

    same(gradients(mlp, hidden(3, 7, 6), run), expected)


@pytest.mark.parametrize("shards", [1, 4, 30])
@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_one_number_per_tile(reduction: str | None, shards: int) -> None:
    head, y = Head(), targets()

    def fn(x: Tensor, y: Tensor, self: Head) -> Tensor:
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), y.flatten(), reduction="sum")

    def run(x: Tensor) -> Tensor:
        out = alst.sequence_tiled_compute(
            fn, 8, shards, {"x": x, "y": y}, {"self": head}, "x", list(head.parameters()), 0, reduction
        )
        assert out.shape == ((min(shards, 8),) if reduction is None else ())
        return out.sum() * (min(shards, 8) if reduction == "mean" else 1)

    same(gradients(head, hidden(2, 8, 6), run), gradients(head, hidden(2, 8, 6), lambda x: fn(x, y, head)))


def test_what_is_refused() -> None:
    head, x = Head(), hidden(2, 8, 6)
    with pytest.raises(ConfigError, match="'mean' or 'sum', got 'none'"):
        tiled_loss(head, x, 2, "none")
    with pytest.raises(BatchError, match="x must be"):
        tiled_loss(head, x[:, :7], 2)
    with pytest.raises(BatchError, match="mask must be"):
        tiled_loss(head, x, 2, mask=torch.ones(2, 7))
    with pytest.raises(ConfigError, match="shards must be an integer of at least 1, got 0"):
        tiled_loss(head, x, 0)
    with pytest.raises(ModelError, match=r"must be one number, got \[6, 11\]"):
        tiled_loss(head, x, 3, fn=lambda self, tokens, y: self.lm_head(tokens))
    named: dict[str, Any] = {"compute_params": [], "output_unshard_dimension": 1, "output_reduction": None}

    def compute(**changed: Any) -> Tensor:
        return alst.sequence_tiled_compute(lambda x: x, 8, 2, {"x": x}, {}, changed.pop("key", "x"), **named | changed)

    with pytest.raises(ConfigError, match="output_reduction must be"):
        compute(output_reduction="max")
    with pytest.raises(ConfigError, match="output_unshard_dimension must be"):
        compute(output_unshard_dimension=2)
    with pytest.raises(ConfigError, match="grad_requiring_tensor_key 'z'"):
        compute(key="z")
    with pytest.raises(BatchError, match="seqlen=9"):
        alst.sequence_tiled_compute(lambda x: x, 9, 2, {"x": x}, {}, "x", [])
    for gone, instead in (
        (alst.TiledLoss, "TiledFusedLogitsLoss"),
        (alst.UlyssesSPFwdLossBwdWithLogits, "reduce_loss"),
    ):
        with pytest.raises(ModelError, match=instead):
            gone(1, 2, three=3)
    with pytest.raises(ModelError, match="TiledFusedLogitsLoss"):
        alst.TiledLoss.apply(1, 2)  # type: ignore[call-arg]


def test_a_mask_is_made_once_and_only_when_asked_for() -> None:
    made: list[dict[str, Any]] = []

    def make(**asked: Any) -> str:
        made.append(asked)
        return "mask"

    padding = torch.ones(1, 3)
    deferred = Deferred(make, {"attention_mask": padding, "local_size": None, "use_vmap": False})
    assert deferred.padding is padding and deferred.stand_in is None and not made
    assert deferred.mask() == deferred.mask() == "mask" and len(made) == 1
    windows, chunks = SimpleNamespace(sliding_window=4), SimpleNamespace(attention_chunk_size=4, sliding_window=None)
    assert Deferred(make, {"local_size": 4, "config": windows}).stand_in == Window(4)
    for asked, told in (
        ({"local_size": 4, "config": chunks}, "chunks of 4 tokens that do not see each other"),
        ({"local_size": 4}, "a window or chunks of 4 tokens"),
        ({"local_size": 4, "config": windows, "use_vmap": True}, "a mask of its own making"),
    ):
        assert Deferred(make, asked).stand_in == Refused(told)


def test_offloading_by_deepspeeds_name() -> None:
    from torch.utils.checkpoint import checkpoint

    mlp = Mlp()
    expected = gradients(mlp, hidden(2, 7, 6), lambda x: mlp(mlp(x)).square().sum())
    manager = alst.get_checkpoint_hidden_states_offloading_ctx_manager(
        use_pin_memory=False, use_streams=True, min_offload_bytes=0, max_fwd_stash_count=1, keep_last_count=0
    )

    def step(x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(mlp, x, use_reentrant=False)  # type: ignore[assignment]
        return x.square().sum()

    for _ in range(2):
        with manager:
            same(gradients(mlp, hidden(2, 7, 6), step), expected)
    with manager, pytest.raises(TrainingError, match="entered already"), manager:
        pass
    with pytest.raises(ConfigError, match="keep_last_count"):
        alst.get_checkpoint_hidden_states_offloading_ctx_manager(keep_last_count=-1)

"""Functions run tile by tile against one run over all tokens, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import longspan
from longspan.errors import BatchError, ConfigError, ModelError, TrainingError
from longspan.tiled import cut_tokens

B, S, D = 2, 13, 6
SIZES = [{"tiles": 1}, {"tiles": 3}, {"tiles": 13}, {"tiles": 40}, {"tile_tokens": 1}, {"tile_tokens": 5}, {}]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill `torch.empty` with NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


class Gated(nn.Module):
    """An MLP with biases that flattens its input, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(D, 9), nn.Linear(D, 9), nn.Linear(9, D)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, D)
        return self.down_proj(F.silu(self.gate_proj(flat)) * self.up_proj(flat)).view(x.shape)


def check(plain, tiled, leaves) -> None:
    """Compare outputs, and under random incoming gradients every gradient."""
    plain, tiled = ((out,) if isinstance(out, Tensor) else out for out in (plain, tiled))
    assert len(plain) == len(tiled)
    for a, b in zip(tiled, plain, strict=True):
        assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    used = [i for i, out in enumerate(plain) if out.requires_grad]
    weights = [torch.randn_like(plain[i]) for i in used]
    wanted = torch.autograd.grad([plain[i] for i in used], leaves, weights, allow_unused=True)
    found = torch.autograd.grad([tiled[i] for i in used], leaves, weights, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert float((a - b).norm()) <= 1e-12 * float(b.norm())
            assert b.abs().sum() > 0


@pytest.mark.parametrize("size", SIZES)
def test_a_module_on_rows_that_are_not_contiguous(size):
    mlp, base = Gated(), randn(S, B, D)
    x = base.transpose(0, 1)
    check(mlp(x.contiguous()), longspan.tile(mlp, x, **size), [base, *mlp.parameters()])


@pytest.mark.parametrize("size", SIZES)
def test_several_inputs_outputs_and_whole_arguments(size):
    x, y, factor, shift = randn(B, S, D), randn(B, S, 3), randn(D), randn(3)
    labels = torch.arange(B * S).view(B, S)

    def fn(x, pair, *, whole, scale, unused):
        y, labels = pair
        assert unused is None
        mixed = torch.tanh(x * whole["factor"]) * y.sum(-1, keepdim=True)
        return mixed, (y * whole["shift"] * labels[..., None]) * scale, labels + 1, (x * 2).detach()

    whole = {"whole": {"factor": factor, "shift": shift}, "scale": 0.3, "unused": None}
    plain = fn(x, (y, labels), **whole)
    check(plain, longspan.tile(fn, x, (y, labels), whole=whole, **size), [x, y, factor, shift])


@pytest.mark.parametrize("dim", [0, 1, -2, 2, -1])
def test_dims(dim):
    x = randn(4, 5, 6)
    check(torch.sin(x) * x, longspan.tile(lambda t: torch.sin(t) * t, x, dim=dim, tiles=3), [x])


@pytest.mark.parametrize("size", SIZES)
def test_losses_are_added_up(size):
    x, weight, labels = randn(B, S, D), randn(7, D), torch.randint(7, (B, S))

    def loss(x, labels):
        total = F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
        return total, (labels > 3).sum()

    tiled = longspan.tile(loss, x, labels, parameters=[weight], reduce="sum", **size)
    check(loss(x, labels), tiled, [x, weight])


@pytest.mark.parametrize("size", [{"tiles": 4}, {"tile_tokens": 4}])
@pytest.mark.parametrize("reduce", [None, "sum"])
def test_no_tokens(reduce, size):
    mlp, x = Gated(), randn(B, 0, D)
    parameters = [*mlp.parameters(), *mlp.parameters()]
    fn = mlp if reduce is None else lambda t: mlp(t).sum()
    out = longspan.tile(fn, x, parameters=parameters, reduce=reduce, **size)
    assert out.shape == ((B, 0, D) if reduce is None else ())
    out.sum().backward()
    for leaf in (x, *mlp.parameters()):
        assert leaf.grad is not None
        assert leaf.grad.abs().sum() == 0


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 50), tiles=st.integers(1, 60) | st.none(), tile_tokens=st.integers(1, 60))
def test_cuts_cover_every_token_once(tokens, tiles, tile_tokens):
    cuts = list(cut_tokens(tokens, tiles, None if tiles else tile_tokens))
    assert [t for start, stop in cuts for t in range(start, stop)] == list(range(tokens))
    sizes = [stop - start for start, stop in cuts]
    assert len(cuts) == 1 or min(sizes) > 0
    if tiles:
        assert len(cuts) == max(1, min(tiles, tokens))
        assert max(sizes) - min(sizes) <= 1
    else:
        assert max(sizes) <= tile_tokens


def test_a_parameter_named_twice_counts_once():
    mlp, x = Gated(), randn(B, S, D)
    check(mlp(x), longspan.tile(mlp, x, parameters=[mlp.down_proj.weight] * 2, tiles=3), [*mlp.parameters()])


def test_sums_over_many_tiles_are_made_in_float32():
    x = torch.full((1, 1024), 1.0, dtype=torch.bfloat16)
    total = longspan.tile(lambda t: t.sum(), x, tiles=1024, reduce="sum")
    assert (total.dtype, total.item()) == (torch.bfloat16, 1024)


def test_frozen_parts():
    mlp, x = Gated(), randn(B, S, D)
    mlp.up_proj.requires_grad_(False)
    trained = [p for p in mlp.parameters() if p.requires_grad]
    check(mlp(x), longspan.tile(mlp, x, tiles=3), [x, *trained])
    check(mlp(x.detach()), longspan.tile(mlp, x.detach(), tiles=3), trained)
    mlp.requires_grad_(False)
    check(mlp(x), longspan.tile(mlp, x, tiles=3), [x])


def test_nothing_to_train_is_a_plain_loop(monkeypatch):
    mlp, x = Gated(), randn(B, S, D, grad=False)
    monkeypatch.setattr(longspan.tiled.TiledFunction, "apply", None)
    with torch.no_grad():
        assert torch.equal(longspan.tile(mlp, x.requires_grad_(), tiles=1), mlp(x))
    with torch.inference_mode():
        assert torch.equal(longspan.tile(mlp, torch.ones(B, S, D).double(), tiles=1), mlp(torch.ones(B, S, D).double()))
    mlp.requires_grad_(False)
    out = longspan.tile(mlp, x.detach(), tiles=3)
    assert not out.requires_grad
    torch.testing.assert_close(out, mlp(x.detach()))


def test_unused_parameters_and_outputs_have_no_gradient():
    x, spare, weight = randn(B, S, D), randn(3), randn(D)

    def fn(x):
        return x * weight, x + 1

    first, second = longspan.tile(fn, x, parameters=[weight, spare], tiles=3)
    found = torch.autograd.grad(second.sum(), [x, weight, spare], allow_unused=True, retain_graph=True)
    assert torch.equal(found[0], torch.ones_like(x))
    assert found[1] is None
    assert found[2] is None
    found = torch.autograd.grad(first.sum(), [weight, spare], allow_unused=True)
    torch.testing.assert_close(found[0], x.sum((0, 1)))
    assert found[1] is None


def test_an_undeclared_parameter_is_named():
    mlp, x, weight = Gated(), randn(B, S, D), randn(D)
    outside = weight * 2
    with pytest.raises(ModelError, match=r"uses weight of shape \[6\].*pass it in `parameters`"):
        longspan.tile(lambda t: t * weight, x, tiles=2)
    with pytest.raises(ModelError, match=r"uses mlp\.(gate|up|down)_proj\.(weight|bias) of shape"):
        longspan.tile(lambda t: 2 * mlp(t), x, tiles=2)
    with pytest.raises(ModelError, match=r"uses self\.gate_proj\.bias of shape"):
        longspan.tile(mlp.forward, x, parameters=[p for n, p in mlp.named_parameters() if n != "gate_proj.bias"])
    with pytest.raises(ModelError, match="uses weight of shape"):
        longspan.tile(lambda t: t * weight, x.detach(), tiles=2)
    with pytest.raises(ModelError, match=r"computed outside of it \(MulBackward0\).*in `whole`"):
        longspan.tile(lambda t: t * outside, x, parameters=[weight], tiles=2)
    with pytest.raises(ModelError, match="not a leaf"):
        longspan.tile(lambda t: t * outside, x, parameters=[outside], tiles=2)
    with torch.no_grad():
        longspan.tile(lambda t: t * weight, x, tiles=2)


def test_mistakes_are_told():
    x = randn(B, S, D)
    with pytest.raises(ConfigError, match="tiles must be an integer of at least 1, got 0"):
        longspan.tile(torch.sin, x, tiles=0)
    with pytest.raises(ConfigError, match=r"tile_tokens must be an integer of at least 1, got 2\.5"):
        longspan.tile(torch.sin, x, tile_tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="either tiles or tile_tokens"):
        longspan.tile(torch.sin, x, tiles=2, tile_tokens=2)
    with pytest.raises(ConfigError, match="reduce must be 'sum' or None, got 'mean'"):
        longspan.tile(torch.sin, x, tiles=2, reduce="mean")  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="no tensor to cut"):
        longspan.tile(torch.sin, 3.0)
    with pytest.raises(BatchError, match="dim 3"):
        longspan.tile(torch.sin, x, dim=3)
    with pytest.raises(BatchError, match=r"inputs of \[4, 13\] tokens"):
        longspan.tile(torch.add, x, randn(B, 4, D))
    with pytest.raises(ModelError, match=r"turned 5 tokens into \[\], .*reduce='sum'"):
        longspan.tile(torch.sum, x, tile_tokens=5)
    with pytest.raises(ModelError, match="must return a tensor or a tuple of tensors, got NoneType"):
        longspan.tile(lambda t: None, x)
    with pytest.raises(ModelError, match="writes into its arguments"):
        longspan.tile(lambda t: t.mul_(2), x.detach(), tiles=2)


def test_hooks_run_once_with_the_whole_gradient():
    mlp, x, calls = Gated(), randn(B, S, D), []
    (wanted,) = torch.autograd.grad(mlp(x).sum(), mlp.down_proj.weight)
    mlp.down_proj.weight.register_hook(lambda g: calls.append(g.clone()) or g / 2)
    mlp.down_proj.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad))
    longspan.tile(mlp, x, tiles=4).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(calls[0], wanted)
    torch.testing.assert_close(calls[1], wanted / 2)


def test_hooks_on_saved_tensors_see_the_input_alone():
    mlp, x, seen = Gated(), randn(1, S, D), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
        out = longspan.tile(mlp, x, tiles=4)
        assert seen == [x.shape]
        out.sum().backward()
    assert seen == [x.shape]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant):
    mlp, x = Gated(), randn(B, S, D)
    runs: list[int] = []

    def counted(t):
        runs.append(t.shape[1])
        return mlp(t)

    def region(x):
        return x + longspan.tile(counted, torch.sin(x), parameters=[*mlp.parameters()], tiles=3)

    wanted = torch.autograd.grad((x + mlp(torch.sin(x))).square().sum(), [x, *mlp.parameters()])
    out = checkpoint(region, x, use_reentrant=use_reentrant)
    out.square().sum().backward()
    found = [leaf.grad for leaf in (x, *mlp.parameters())]
    torch.testing.assert_close(found, list(wanted), rtol=1e-12, atol=1e-12)
    assert len(runs) == (9 if use_reentrant else 6), "the region ends with the tiles: their forward is not repeated"


def test_backward_twice_but_not_second_order():
    mlp, x = Gated(), randn(B, S, D)
    out = longspan.tile(mlp, x, tiles=3).square().sum()
    first = torch.autograd.grad(out, [x, *mlp.parameters()], retain_graph=True)
    second = torch.autograd.grad(out, [x, *mlp.parameters()], retain_graph=True)
    assert all(map(torch.equal, first, second))
    with pytest.raises(TrainingError, match="cannot be differentiated again"):
        torch.autograd.grad(out, x, create_graph=True)
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_inputs_changed_before_backward_are_noticed():
    mlp, leaf = Gated(), randn(B, S, D)
    x = leaf * 1
    out = longspan.tile(mlp, x, tiles=3)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_memory_is_released_by_backward():
    mlp, leaf = Gated(), randn(B, S, D)
    x = leaf * 1
    storage = StorageWeakRef(x.untyped_storage())
    loss = longspan.tile(mlp, x, tiles=3).sum()
    del x
    assert not storage.expired()
    loss.backward()
    assert storage.expired(), "what was saved goes with backward, not with the last reference to the loss"


def test_nothing_is_left_of_a_tile():
    """Operations that save their own output must not keep their graph alive, also where nobody differentiates it."""
    made: list[StorageWeakRef] = []

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.exp(), x.sigmoid()
        made.extend(StorageWeakRef(t.untyped_storage()) for t in (first, second))
        return first * second, first

    leaf = randn(B, S, D)
    with torch.no_grad():
        longspan.tile(fn, leaf, tiles=3)
    out, _ = longspan.tile(fn, leaf, tiles=3)
    assert all(storage.expired() for storage in made)
    out.sum().backward()
    assert len(made) == 3 * 3 * 2
    assert all(storage.expired() for storage in made)


def test_dropout_is_replayed():
    mlp, x = nn.Sequential(Gated(), nn.Dropout(0.5)), randn(B, S, D)
    torch.manual_seed(7)
    plain = torch.cat([mlp(x[:, a:b].contiguous()) for a, b in cut_tokens(S, 3, None)], 1)
    wanted = torch.autograd.grad(plain.square().sum(), [x, *mlp.parameters()])
    torch.manual_seed(7)
    tiled = longspan.tile(mlp, x, tiles=3)
    torch.rand(3)
    state = torch.get_rng_state()
    found = torch.autograd.grad(tiled.square().sum(), [x, *mlp.parameters()])
    assert torch.equal(tiled, plain)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_is_kept_in_backward():
    mlp, x = Gated().float(), randn(B, 64, D).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        plain, tiled = mlp(x), longspan.tile(mlp, x, tiles=1)
        cut = longspan.tile(mlp, x, tiles=5)
    assert tiled.dtype == torch.bfloat16
    assert torch.equal(plain, tiled)
    weights = torch.randn_like(plain)
    leaves = [x, *mlp.parameters()]
    wanted = torch.autograd.grad(plain, leaves, weights)
    for a, b in zip(torch.autograd.grad(tiled, leaves, weights), wanted, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(torch.autograd.grad(cut, leaves, weights), wanted, strict=True):
        assert float((a - b).norm()) < 0.01 * float(b.norm())


def test_gradients_of_many_tiles_are_summed_in_float32():
    """In bfloat16 the sum over 512 tiles would be off by percents."""
    mlp = Gated().bfloat16()
    x = torch.randn(1, 4096, D).bfloat16()
    errors = []
    exact = torch.autograd.grad(Gated.forward(mlp.double(), x.double()).sum(), mlp.down_proj.weight)[0]
    for tiles in (1, 512):
        mlp = mlp.bfloat16()
        found = torch.autograd.grad(longspan.tile(mlp, x, tiles=tiles).sum(), mlp.down_proj.weight)[0]
        errors.append(float((found.double() - exact).norm() / exact.norm()))
    assert errors[1] < 1.5 * errors[0] < 0.02

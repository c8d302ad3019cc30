"""What tiled computation must not disturb or depend on: memory, hooks, autocast, random numbers, recompute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from longspan import tiling
from longspan.errors import TrainingError
from longspan.loss import Head, LossOptions, tiled_loss, token_logps
from longspan.tiling import GradientSum

N, D, V = 64, 5, 33
REDUCTIONS = ["sum", "mean", "none"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make(dtype=torch.float64):
    hidden = torch.randn(1, N, D, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, V, (1, N)).masked_fill(torch.rand(1, N) < 0.2, -100)
    return hidden, labels, nn.Linear(D, V).to(dtype)


def gradients(loss: Tensor, hidden: Tensor, module: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.sum() * 0.37, (hidden, *module.parameters()))


class Largest(TorchDispatchMode):
    """Record the elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tensor_is_larger_than_a_tile_of_logits(reduction):
    hidden, labels, module = make()
    options = LossOptions(softcap=2.0, label_smoothing=0.1, z_loss=0.1)
    with Largest() as largest:
        tiled_loss(hidden, module, labels, tile_tokens=10, reduction=reduction, options=options).sum().backward()
        torch.cat(token_logps(hidden, module, labels, tile_tokens=10, entropy=True)).sum().backward()
    assert largest.elements == max(10 * V, N * D)
    with Largest() as largest:
        F.cross_entropy(module(hidden)[0], labels[0]).backward()
    assert largest.elements == N * V


def test_chosen_tiles(monkeypatch):
    hidden, labels, module = make()
    seen = []
    head = Head(lambda x: seen.append(x.shape[1]) or module(x), tuple(module.parameters()))
    tiled_loss(hidden, head, labels, reduction="none").sum().backward()
    assert seen == [N, N]
    seen.clear()
    monkeypatch.setattr(tiling, "FIRST_LOGIT_TILE_TOKENS", 3)
    monkeypatch.setattr(tiling, "LOGIT_TILE_ELEMENTS", 25 * V + 1)
    tiled_loss(hidden, head, labels, reduction="none").sum().backward()
    assert seen == [3, 25, 25, 11] * 2
    seen.clear()
    monkeypatch.setattr(tiling, "LOGIT_TILE_ELEMENTS", V // 2)
    tiled_loss(hidden, head, labels)
    assert seen == [3] + [1] * (N - 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_gradients_are_made_that_nobody_needs(reduction, monkeypatch):
    hidden, labels, module = make()
    expected = tiled_loss(hidden, module, labels, reduction=reduction)
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        found = tiled_loss(hidden, module, labels, reduction=reduction)
    frozen = tiled_loss(hidden.detach(), module.requires_grad_(False), labels, reduction=reduction)
    assert not found.requires_grad
    assert not frozen.requires_grad
    assert torch.equal(found, expected)
    assert torch.equal(frozen, expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_hooks_of_parameters_run_once_with_the_whole_gradient(reduction):
    hidden, labels, module = make()
    expected = gradients(tiled_loss(hidden, module, labels, tile_tokens=10, reduction=reduction), hidden, module)
    calls = []
    module.weight.register_hook(lambda g: calls.append(g.clone()) or g / 2)
    found = gradients(tiled_loss(hidden, module, labels, tile_tokens=10, reduction=reduction), hidden, module)
    assert len(calls) == 1
    assert torch.equal(calls[0], expected[1])
    assert torch.equal(found[1], expected[1] / 2)
    assert torch.equal(found[2], expected[2])
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        tiled_loss(hidden[..., 1:], module, labels, reduction=reduction).sum().backward()
    gradients(module(hidden), hidden, module)
    assert len(calls) == 2, "hooks must be back, also after an error"


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_hooks_of_weight_tensors_run_once_with_the_whole_gradient(reduction):
    hidden, labels, module = make()
    calls = []
    for weight in (module.weight, module.weight * 2):
        (expected,) = torch.autograd.grad(
            tiled_loss(hidden, weight, labels, tile_tokens=10, reduction=reduction).sum(), weight, retain_graph=True
        )
        weight.register_hook(calls.append)
        weight.retain_grad()
        tiled_loss(hidden, weight, labels, tile_tokens=10, reduction=reduction).sum().backward()
        assert torch.equal(calls[0], expected)
        torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)
        calls.clear()
        module.zero_grad()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_hooks_on_saved_tensors_see_no_tiles(reduction):
    hidden, labels, module = make()
    expected = gradients(tiled_loss(hidden, module, labels, tile_tokens=10, reduction=reduction), hidden, module)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
        loss = tiled_loss(hidden, module, labels, tile_tokens=10, reduction=reduction)
        found = gradients(loss, hidden, module)
    kept = {(N, D), (N,)} if reduction == "none" else {(N, D), (V, D), (V,)}
    assert set(map(tuple, seen)) - {()} == kept
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant, reduction):
    hidden, labels, module = make()

    def loss(x):
        return tiled_loss(x, module, labels, tile_tokens=10, reduction=reduction)

    expected = gradients(loss(hidden), hidden, module)
    (checkpoint(loss, hidden, use_reentrant=use_reentrant).sum() * 0.37).backward()
    found = (hidden.grad, *(parameter.grad for parameter in module.parameters()))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice_but_not_second_order(reduction):
    hidden, labels, module = make()
    loss = tiled_loss(hidden, module, labels, tile_tokens=10, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (hidden, module.weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, module.weight), retain_graph=True)
    assert all(map(torch.equal, first, second))
    with pytest.raises(TrainingError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, (hidden, module.weight), create_graph=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast_holds_in_forward_and_backward(reduction):
    hidden, labels, module = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            tiled_loss(hidden, module, labels, tile_tokens=10)  # must leave no cast weight without a gradient behind
        plain = F.cross_entropy(module(hidden)[0].float(), labels[0], reduction=reduction)
        loss = tiled_loss(hidden, module, labels, tile_tokens=N, reduction=reduction)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.flatten(), plain.flatten(), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(loss, tiled_loss(hidden, module, labels, reduction=reduction), rtol=1e-5)
    expected, found = gradients(plain, hidden, module), gradients(loss, hidden, module)
    tolerance = 1e-6 if reduction == "none" else 2e-2  # the other two round bf16 gradients before they scale them
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < tolerance * b.norm()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_dropout_in_the_head_is_replayed(reduction):
    hidden, labels, linear = make()
    head = nn.Sequential(nn.Dropout(0.5), linear)
    torch.manual_seed(7)
    tiles = [head(hidden[:, a : a + 10]) for a in range(0, N, 10)]
    plain = F.cross_entropy(torch.cat(tiles, 1)[0], labels[0], reduction=reduction)
    expected = gradients(plain, hidden, linear)
    torch.manual_seed(7)
    loss = tiled_loss(hidden, head, labels, tile_tokens=10, reduction=reduction)
    torch.rand(3)
    state = torch.get_rng_state()
    torch.testing.assert_close(loss.flatten(), plain.flatten())
    torch.testing.assert_close(gradients(loss, hidden, linear), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_unused_outputs_and_parameters_cost_nothing(monkeypatch):
    hidden, labels, module = make()
    spare = nn.Parameter(torch.zeros(3))
    head = Head(module.forward, (*module.parameters(), spare))
    logps, _ = token_logps(hidden, head, labels, tile_tokens=10, entropy=True)
    expected = gradients(token_logps(hidden, module, labels, tile_tokens=10), hidden, module)
    differentiated, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda t, *a, **kw: differentiated.append(len(t)) or grad(t, *a, **kw))
    *found, unused = grad(logps.sum() * 0.37, (hidden, *head.parameters), allow_unused=True)
    assert unused is None
    assert differentiated == [1] * 7
    torch.testing.assert_close(tuple(found), expected, rtol=1e-12, atol=0)


def test_narrow_gradients_are_rounded_once(monkeypatch):
    """A factor that bf16 cannot hold must not shift all gradients by one relative error."""
    monkeypatch.setattr(tiling, "_SLICE_ELEMENTS", 300)
    gradient, factor = torch.randn(100, 10).bfloat16(), torch.tensor(1.0035)
    exact = (gradient.double() * factor.double()).bfloat16()
    assert torch.equal(tiling.scaled(gradient, factor, torch.bfloat16), exact)
    assert not torch.equal(gradient * factor.bfloat16(), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 7])
def test_gradients_add_up_in_a_wide_dtype_and_are_rounded_once(tiles: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tiles)
    gradients = [torch.randn(50, 3).to(dtype) for _ in range(tiles)]
    kept = [gradient.clone() for gradient in gradients]
    wanted = gradients[0].to(torch.promote_types(dtype, torch.float32))
    for gradient in gradients[1:]:
        wanted = wanted + gradient
    for _ in range(2):
        total = GradientSum(2)
        for gradient in gradients:
            total.add([gradient, None])
        rounded, unused = total.rounded([dtype, dtype])
        assert unused is None
        assert rounded is not None
        assert torch.equal(rounded, wanted.to(dtype))
    for _ in range(2):  # reading the sums does not change them
        whole, unused = total.sums
        assert unused is None
        assert whole is not None
        assert torch.equal(whole, wanted)
    assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))

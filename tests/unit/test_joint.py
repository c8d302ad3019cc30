"""Dividing a traced half and its derivative: what is kept, and that nothing else is computed twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from longspan.stream.compiled import Compiler
from longspan.stream.joint import divide, writes

DTYPE = torch.float64


def half(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated MLP on a residual stream, with its elementwise work on both sides."""
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
    return x + (nn.functional.silu(normed @ gate) * (normed @ up)) @ down


def joint(x: Tensor, dy: Tensor, *weights: Tensor) -> list[Tensor]:
    operands = [t.requires_grad_() for t in (x, *weights)]
    with torch.enable_grad():
        y = half(*operands)
        return [y.detach(), *torch.autograd.grad(y, operands, dy)]


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(7, 4), (7, 4), (4, 6), (4, 6), (6, 4)]
    return [torch.randn(shape, dtype=DTYPE) for shape in shapes]


def products(module: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.ops.aten.mm.default for node in module.graph.nodes)


def test_both_parts_give_what_the_whole_gives() -> None:
    given = operands()
    expected = joint(*[t.clone() for t in given])
    traced = make_fx(joint)(*[t.clone() for t in given])
    forward, backward = divide(traced, 1, range(1, 2))
    y, *kept = forward(given[0], *given[2:])
    gradients = backward(*given, *kept)
    for found, wanted in zip((y, *gradients), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_products_are_kept_where_needed_and_never_computed_again() -> None:
    traced = make_fx(joint)(*operands())
    forward, backward = divide(traced, 1, range(1, 2))
    kept = len(list(forward.graph.nodes)[-1].args[0]) - 1
    assert kept == 2, "gate and up; nobody needs what the last product returns"
    assert (products(forward), products(backward)) == (3, 6)


def test_of_an_adapter_and_its_layer_the_sum_is_kept() -> None:
    """The product with the second matrix of the adapter is as large as the layer's, and only their sum is read."""

    def adapted(x: Tensor, dy: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        trained = [t.requires_grad_() for t in (x, a, b)]
        with torch.enable_grad():
            y = nn.functional.silu(x @ weight + 2 * (x @ a @ b)) @ weight.T
            return [y.detach(), *torch.autograd.grad(y, trained, dy)]

    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=DTYPE) for shape in ((7, 4), (7, 4), (4, 6), (4, 2), (2, 6))]
    expected = adapted(*[t.clone() for t in given])
    forward, backward = divide(make_fx(adapted, tracing_mode="fake")(*[t.clone() for t in given]), 1, range(1, 2))
    y, *kept = forward(given[0], *given[2:])
    assert [tuple(t.shape) for t in kept] == [(7, 2), (7, 6)]
    assert products(backward) == 6, "of the gradients alone"
    for found, wanted in zip((y, *backward(*given, *kept)), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_fails_in_compiled_code_is_told() -> None:
    def backend(graph: Any, operands: Any) -> Any:
        def run(*tensors: Tensor) -> None:
            raise torch.OutOfMemoryError("no more")

        return run

    torch._dynamo.register_backend(backend, name="out-of-memory")
    compiled, _ = Compiler("out-of-memory").graph("key", torch.sin, [torch.ones(3)], [])
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        compiled(torch.ones(3))


def test_a_gradient_that_needs_no_product_keeps_none() -> None:
    def function(x: Tensor, dy: Tensor, weight: Tensor) -> list[Tensor]:
        x, weight = x.requires_grad_(), weight.requires_grad_()
        with torch.enable_grad():
            y = x @ weight
            return [y.detach(), *torch.autograd.grad(y, [x, weight], dy)]

    given = [torch.randn(3, 4, dtype=DTYPE), torch.randn(3, 5, dtype=DTYPE), torch.randn(4, 5, dtype=DTYPE)]
    forward, backward = divide(make_fx(function)(*given), 1, range(1, 2))
    assert len(list(forward.graph.nodes)[-1].args[0]) == 1
    assert products(backward) == 2


def test_a_function_that_writes_into_its_operands_is_named() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.add_(x)
        return y

    assert writes(make_fx(function)(torch.ones(3))) == ["aten.add_.Tensor"]
    assert not writes(make_fx(half)(*[t for i, t in enumerate(operands()) if i != 1]))

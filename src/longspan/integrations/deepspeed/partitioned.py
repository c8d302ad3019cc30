"""Parameters that ZeRO stage 3 holds in parts: whole for the tiles of one pass, their gradients handed over once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longspan.weights import under_zero3


def partitioned(parameters: Sequence[Tensor]) -> bool:
    """Whether ZeRO stage 3 holds some of the parameters in parts."""
    return any(map(under_zero3, parameters))


@contextmanager
def whole(parameters: Sequence[Tensor], module: nn.Module) -> Iterator[None]:
    """Make parameters whole, and keep ZeRO's hooks from gathering and releasing them around every tile.

    Args:
        module: holds the modules that use them; theirs are the hooks.

    Cost: an all-gather of the parameters that are not whole already. Nothing inside communicates, so ranks may run
        unlike numbers of tiles.
    """
    import deepspeed

    held = {id(parameter) for parameter in parameters}
    quiet = [each for each in module.modules() if all(id(p) in held for p in each.parameters())]
    kept = [(each, each._forward_pre_hooks, each._forward_hooks) for each in quiet]
    with ExitStack() as stack:
        missing = [p for p in parameters if under_zero3(p) and p.numel() != p.ds_numel]  # type: ignore[attr-defined]
        if missing:
            stack.enter_context(deepspeed.zero.GatheredParameters(missing))
        try:
            for each in quiet:
                each._forward_pre_hooks, each._forward_hooks = (
                    type(each._forward_pre_hooks)(),
                    type(each._forward_hooks)(),
                )
            yield
        finally:
            for each, before, after in kept:
                each._forward_pre_hooks, each._forward_hooks = before, after


class Handed(torch.autograd.Function):
    """Run a tiled computation on partitioned parameters, and hand each one's gradient to ZeRO in one piece.

    Args:
        run: (inputs) -> output, differentiable, in which the parameters are leaves.
        parameters: what it uses, trained or not.
        module: as for `whole`.

    Cost: the tiles run forward twice more in backward, and the parameters are gathered once per pass.
    """

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], parameters: Sequence[Tensor], module: nn.Module, *inputs: Tensor
    ) -> Tensor:
        ctx.run, ctx.parameters, ctx.module = run, parameters, module
        ctx.save_for_backward(*inputs)
        with whole(parameters, module):
            return run(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = ctx.needs_input_grad[3:]
        inputs = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needed, strict=True)]
        wanted = [t for t in inputs if t.requires_grad]
        trained = list({id(p): p for p in ctx.parameters if p.requires_grad}.values())
        with whole(ctx.parameters, ctx.module), torch.enable_grad():
            output = ctx.run(*inputs)
            found = torch.autograd.grad(output, [*wanted, *trained], d_output, allow_unused=True)
            hand_over(trained, found[len(wanted) :])
        given = iter(found)
        return None, None, None, *(next(given) if t.requires_grad else None for t in inputs)


def hand_over(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Let parameters, whole at this moment, accumulate gradients as in any backward pass, so that ZeRO reduces them."""
    pairs = [(p.view_as(p), g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([alias for alias, _ in pairs], [gradient for _, gradient in pairs])

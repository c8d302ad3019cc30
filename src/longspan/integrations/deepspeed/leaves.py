"""Find what a function trains, by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from longspan.tiling import Ambient, private_graph


def leaves_of(fn: Callable[..., Any], inputs: Any, passed: dict[str, Any] | Any = None, *more: Any) -> list[Tensor]:
    """Return the leaves that need a gradient and that a function uses beside its arguments.

    Args:
        fn: called as fn(inputs, **passed) with passed a dict, or else as fn(inputs, passed, *more); inputs are few
            tokens.

    Cost: one run on these; random numbers are left as they were.
    """
    arguments = (inputs,) if isinstance(passed, dict) else (inputs, passed, *more)
    named = passed if isinstance(passed, dict) else {}
    given = [leaf for leaf in tree_flatten((arguments, named))[0] if isinstance(leaf, Tensor)]
    device = given[0].device if given else torch.device("cpu")
    with Ambient.capture(device, rng=True).restored(), private_graph(()):
        outputs = fn(*arguments, **named)
    stack = [t.grad_fn for t in tree_flatten(outputs)[0] if isinstance(t, Tensor) and t.grad_fn is not None]
    known, seen, found = {id(leaf) for leaf in given}, set(), {}
    while stack:
        node: Any = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in known:
            found[id(node.variable)] = node.variable
        stack += [parent for parent, _ in node.next_functions if parent is not None]
    return list(found.values())

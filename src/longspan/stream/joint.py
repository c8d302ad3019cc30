"""A traced half and its derivative, divided into a forward that also returns its matrix products and a backward that
takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    getattr(_aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm") if hasattr(_aten, name)
)
"""Operators whose results are worth keeping: all else is as cheap to compute as to read."""


@dataclass(frozen=True)
class Joint:
    """The two functions.

    Args:
        forward: (inputs) -> results, then products.
        backward: (inputs, with the gradients of the results at `tangents`; products) -> gradients.
        results: how many results there are.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    results: int


def writes(traced: GraphModule) -> list[str]:
    """Name the operators of a traced function that write into their operands: such a function cannot be divided."""
    found = {
        str(node.target)
        for node in traced.graph.nodes
        if node.op == "call_function" and getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    }
    return sorted(found)


def divide(traced: GraphModule, results: int, tangents: range) -> tuple[GraphModule, GraphModule]:
    """Divide a traced function of inputs and gradients that returns results and gradients.

    Args:
        results: how many of its outputs are results; the others are gradients.
        tangents: which of its inputs are gradients of the results.

    Returns:
        forward of the inputs without the tangents -> (*results, *products); backward of all inputs and the products ->
        gradients. The products are those that the gradients need; what else they need is computed from inputs and
        products again.
    """
    nodes = list(traced.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    outputs = list(nodes[-1].args[0])
    given = [node for position, node in enumerate(inputs) if position not in tangents]
    products = _products(nodes, outputs[results:], {inputs[position] for position in tangents})
    forward = _part(traced, given, [*outputs[:results], *products])
    return forward, _part(traced, [*inputs, *products], outputs[results:])


def _products(nodes: Sequence[Node], gradients: Iterable[Any], tangents: set[Node]) -> list[Node]:
    """Find the matrix products of the forward that the gradients need, in order."""
    behind = set(tangents)
    for node in nodes:
        if any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    found, seen = set(), set()
    waiting = [node for node in gradients if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in _PRODUCTS and node not in behind:
            found.add(node)
        else:
            waiting.extend(node.all_input_nodes)
    return [node for node in nodes if node in found]


def _part(traced: GraphModule, inputs: Sequence[Node], outputs: Sequence[Any]) -> GraphModule:
    """Copy out of a function what computes `outputs` from `inputs`."""
    graph = Graph()
    known: dict[Node, Node] = {}
    for position, node in enumerate(inputs):
        known[node] = graph.placeholder(f"input_{position}")
        known[node].meta = dict(node.meta)
    needed, waiting = set(), [node for node in outputs if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in known:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    for node in traced.graph.nodes:
        if node in needed:
            known[node] = graph.node_copy(node, lambda source: known[source])
    graph.output(tuple(known[node] if isinstance(node, Node) else node for node in outputs))
    part = GraphModule(traced, graph)
    part.graph.lint()
    return part

"""A traced half and its derivative, divided into a forward that also returns its matrix products and a backward that
takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from torch import Tensor
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


def _products(nodes: Sequence[Node], gradients: Sequence[Any], tangents: set[Node]) -> list[Node]:
    """Find the fewest bytes from which the gradients follow without a matrix product of the forward, in order.

    A least cut between these products and what the derivative reads: of an adapter's product and the one that it is
    added to, it keeps the sum alone. Of equal cuts it is the one next to the products.
    """
    behind = set(tangents)
    for node in nodes:
        if any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    flow = networkx.DiGraph()
    flow.add_nodes_from(("derivative", "forward"))
    flow.add_edges_from(("derivative", (node, "kept")) for node in gradients if isinstance(node, Node))
    for node in sources_of(gradients):
        flow.add_edge((node, "kept"), (node, "computed"), capacity=math.inf if node in behind else _bytes(node))
        flow.add_edges_from(((node, "computed"), (source, "kept")) for source in node.all_input_nodes)
        if node.target in _PRODUCTS and node not in behind:
            flow.add_edge((node, "computed"), "forward")
    _, (_, near) = networkx.minimum_cut(flow, "derivative", "forward")
    return [node for node in nodes if (node, "computed") in near and (node, "kept") not in near]


def sources_of(outputs: Iterable[Any]) -> set[Node]:
    """Return the nodes among `outputs` and all that they are computed from."""
    found: set[Node] = set()
    waiting = [node for node in outputs if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _bytes(node: Node) -> float:
    """Return the size of a node's result; infinite if it is no tensor, which cannot be kept."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else math.inf


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

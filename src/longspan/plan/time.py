"""Seconds of a step, by cause.

Matrix products run at the machine's rate, attention at its kernel's, everything else at the rate of memory. The
figures marked as measured come from one Llama-3-8B layer and whole steps on H200 (`benchmarks/results/`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from longspan.keep import Keep
from longspan.plan.setup import Setup
from longspan.plan.shapes import LayerShape

COMPILED_PASSES, EAGER_PASSES = (3.2, 7.8), (14.7, 17.8)
"""How often elementwise work moves a token's activations through memory, in forward and in backward; measured."""

GRAPH_FACTOR = 1.3
"""What layers that keep their graph take over what is predicted; measured at 32,768 tokens, and not explained yet."""

LOSS_PASSES = 9.5
"""How often the loss moves its float32 logits through memory."""

RELAYOUT_PASSES = 4
"""How often an exchange of heads moves its operands through memory, besides the link."""

LAYER_LAUNCH_S, TILE_LAUNCH_S = 1.5e-3, 0.5e-3
"""Time of a pass over a layer, and over a tile of it, that no kernel accounts for; measured."""

HOST_UPDATE_GBS = 100.0
"""Bytes per second at which a node's processors update optimizer state."""


@dataclass(frozen=True)
class Clock:
    """Seconds that parts of a step take on one rank."""

    setup: Setup

    def products_s(self, weights: float, passes: float = 1) -> float:
        """Return the time of multiplying every local token with so many weights, `passes` times."""
        return passes * 2 * weights * self.setup.local / (self.setup.cluster.machine.gemm_tflops * 1e12)

    def memory_s(self, size_bytes: float) -> float:
        """Return the time of moving bytes through the device's memory."""
        return size_bytes / (self.setup.cluster.machine.memory_gbs * 1e9)

    def attention_s(self, layer: LayerShape) -> tuple[float, float]:
        """Return the time of a layer's attention kernel, forward and backward."""
        setup = self.setup
        rate, narrow = setup.cluster.machine.rate(setup.kernel), 0.85 if layer.head_dim <= 64 else 1.0
        pairs = setup.rows * layer.pairs(setup.tokens) / setup.ring
        width = setup.query_heads(layer) * 2.0 * pairs
        forward = width * (layer.head_dim + layer.v_head_dim)
        backward = width * (3 * layer.head_dim + 2 * layer.v_head_dim)
        scale = 1e12 * narrow
        return forward / (rate.forward_tflops * scale), backward / (rate.backward_tflops * scale)

    def elementwise_s(self, layer: LayerShape, backward: bool, compiled: bool | None = None) -> float:
        """Return the time of a layer's elementwise work over all local tokens."""
        setup = self.setup
        passes = COMPILED_PASSES if (setup.compiled if compiled is None else compiled) else EAGER_PASSES
        token_bytes = setup.itemsize * (4 * setup.shape.hidden + 3 * layer.intermediate)
        return self.memory_s(passes[backward] * token_bytes * setup.local)

    def exchange_s(self, layer: LayerShape, queries: float, keys: float) -> float:
        """Return the time of exchanging heads: so many tensors like q, and like k and v together.

        Where halves are compiled and there is no ring, most of it travels while neighbouring tiles compute.
        """
        setup = self.setup
        if setup.ulysses == 1:
            return 0
        copies = max(1.0, setup.ulysses / layer.kv_heads)
        width = queries * layer.query_width
        width += keys * copies * layer.kv_heads * (layer.head_dim + layer.v_head_dim)
        moved = setup.local * width * setup.itemsize
        travel = moved * (setup.ulysses - 1) / setup.ulysses / (setup.cluster.machine.link_gbs * 1e9)
        hidden = setup.compiled and setup.ring == 1 and setup.tiles > 1
        return travel * (0.25 if hidden else 1.0) + self.memory_s(moved * RELAYOUT_PASSES)

    def shifts(self, layer: LayerShape) -> int:
        """Return how often a layer's keys travel around the ring in one direction.

        A window reaches some pieces back; in a zigzag their ranks lie as far to either side.
        """
        others, piece = self.setup.ring - 1, self.setup.tokens / (2 * self.setup.ring)
        return others if layer.window is None else min(others, 2 * math.ceil((layer.window - 1) / piece))

    def ring_s(self, layer: LayerShape) -> tuple[float, float]:
        """Return by how much a ring's shifts outlast the attention that hides them, forward and backward."""
        setup = self.setup
        if setup.ring == 1:
            return 0, 0
        machine = setup.cluster.machine
        crosses = setup.ulysses * setup.ring > setup.cluster.node_gpus
        rate = machine.network_gbs if crosses else machine.link_gbs
        numbers = setup.joined * setup.kv_heads(layer) * (layer.head_dim + layer.v_head_dim)
        steps = self.shifts(layer)
        forward, backward = self.attention_s(layer)
        sent = numbers * steps * setup.itemsize / (rate * 1e9)
        returned = numbers * (steps + 1) * 4 / (rate * 1e9) if steps else 0.0
        return max(0.0, sent - forward), max(0.0, sent + returned - backward)

    @property
    def _launch_s(self) -> float:
        return LAYER_LAUNCH_S + self.setup.tiles * TILE_LAUNCH_S if self.setup.cluster.machine.on_gpu else 0.0

    def forward_s(self, layer: LayerShape, compiled: bool | None = None) -> float:
        """Return the time of a layer's forward, attention included."""
        again = layer.query_key_value if self.setup.ring > 1 and not self.setup.compiled else 0
        products = self.products_s(layer.active + again)
        exchange = self.exchange_s(layer, 2, 1)
        ring = self.ring_s(layer)[0]
        elementwise = self.elementwise_s(layer, backward=False, compiled=compiled)
        return products + elementwise + self.attention_s(layer)[0] + exchange + ring + self._launch_s

    def derivative_s(self, layer: LayerShape) -> float:
        """Return the time of a layer's backward if nothing had to be computed again."""
        frozen = 1 - layer.trained / max(1, layer.parameters)
        products = self.products_s(layer.active, 2 - frozen)
        sums = self.setup.tiles * layer.trained * (2 * 4 + self.setup.itemsize) + 16 * layer.trained
        exchange = self.exchange_s(layer, 4, 1)
        work = self.elementwise_s(layer, backward=True) + self.memory_s(sums)
        return products + work + self.attention_s(layer)[1] + self.ring_s(layer)[1] + exchange + self._launch_s

    def graph_s(self, layer: LayerShape, compiled: bool) -> float:
        """Return forward and backward of a layer that keeps its graph."""
        work = self.derivative_s(layer) - self.elementwise_s(layer, backward=True)
        work += self.elementwise_s(layer, backward=True, compiled=compiled) + self.forward_s(layer, compiled)
        attention = sum(self.attention_s(layer))
        return attention + (work - attention) * GRAPH_FACTOR

    def again_s(self, layer: LayerShape, keep: Keep) -> float:
        """Return what a layer's backward computes again, given that its x is at hand.

        Compiled derivatives leave out the last product, and keys and values that are kept. In one go, a tile runs
        whole; projecting keys and values is a further run up to attention.
        """
        setup = self.setup
        if keep is Keep.PRODUCTS:
            return 0.5 * self.elementwise_s(layer, backward=False)
        kv = layer.key_value if keep is not Keep.X_O_KV else 0
        weights = layer.active - layer.down - layer.key_value + kv
        if not setup.compiled:
            weights = layer.active + (layer.query_key_value if keep is not Keep.X_O_KV else 0)
            weights += layer.query_key_value if setup.ring > 1 else 0
        share = weights / layer.active
        work = self.products_s(weights) + (0 if setup.compiled else share * self.elementwise_s(layer, backward=False))
        if setup.compiled:
            work += 0.5 * self.elementwise_s(layer, backward=False)
        if keep is not Keep.X_O_KV and setup.ring == 1:
            work += self.exchange_s(layer, 0, 1)
        if keep is Keep.X:
            work += self.attention_s(layer)[0] + self.ring_s(layer)[0] + self.exchange_s(layer, 2, 1)
        return work

    def replay_s(self, layer: LayerShape) -> float:
        """Return the time from a layer's x and attention output to the next layer's x."""
        share = 1 - layer.query_key_value / layer.active
        work = self.products_s(layer.active - layer.query_key_value)
        return work + share * self.elementwise_s(layer, backward=False) + self._launch_s + self._gather_s(layer)

    def rebuild_s(self, layer: LayerShape) -> float:
        """Return the time of running a layer's forward once more, outside its turn."""
        return self.forward_s(layer) + self._gather_s(layer)

    def _gather_s(self, layer: LayerShape) -> float:
        """Return the time of gathering a layer's parameters, which nothing hides outside its turn."""
        setup = self.setup
        if not setup.gathers or setup.shards("parameters") == 1:
            return 0
        return layer.parameters * setup.itemsize / (setup.cluster.link_gbs * 1e9)

    @cached_property
    def base(self) -> dict[str, float]:
        """Seconds of what does not depend on what layers keep, without the layers themselves."""
        setup, shape = self.setup, self.setup.shape
        logits = setup.local * shape.vocabulary * 4
        head = self.products_s(shape.head, 2 + min(1.0, shape.head_trained / shape.head))
        trained = shape.trained / setup.shards("states")
        causes = {
            "loss": head + self.memory_s(LOSS_PASSES * logits + 40 * setup.local * shape.hidden),
            "optimizer": self.memory_s(trained * setup.optimizer.traffic_bytes),
            "parameters": self._outside_s,
        }
        if setup.optimizer.host_bytes:
            share = HOST_UPDATE_GBS * 1e9 / setup.cluster.local_ranks
            moved = trained * (4 + setup.itemsize) / (setup.cluster.machine.host_gbs * 1e9)
            update = trained * setup.optimizer.traffic_bytes / share + moved
            layers = sum(self.derivative_s(layer) for layer in shape.layers)
            causes["optimizer"] = max(0.0, update - layers)
        return causes

    @property
    def _outside_s(self) -> float:
        """Return the time of collectives for parameters and gradients that nothing hides."""
        setup, shape = self.setup, self.setup.shape
        if setup.cluster.gpus == 1:
            return 0
        rate = setup.cluster.link_gbs * 1e9
        if setup.gathers:
            ends = (shape.outside * setup.itemsize + shape.outside_trained * 4) / rate
            moved = sum(2 * la.parameters * setup.itemsize + 4 * la.trained for la in shape.layers) / rate
        elif setup.engine.startswith("zero"):  # float32 gradients are reduced, then weights gathered
            ends, moved = shape.trained * (4 + (4 if setup.engine == "zero-0" else setup.itemsize)) / rate, 0.0
        else:
            both = 2 * shape.trained * setup.optimizer.gradient_bytes / rate
            ends, moved = (0.0, both) if setup.engine == "ddp" else (both, 0.0)
        hiding = sum(self.forward_s(layer) + self.derivative_s(layer) for layer in shape.layers)
        return ends + max(0.0, moved - hiding)

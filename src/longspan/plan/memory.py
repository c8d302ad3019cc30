"""Bytes on a device and on its host, by cause.

What layers keep is counted here for one layer at a time, and is put together in `solve.py`; all else follows from a
`Setup`. The peak of a step lies in one of a few moments: the last layer's forward, the loss, some layer's backward, or
the reduction of what lies outside the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from longspan.keep import Keep
from longspan.plan import kept
from longspan.plan.kept import LayerSize, most_key_heads, recurrent_features
from longspan.plan.machine import GIB
from longspan.plan.setup import Setup
from longspan.plan.shapes import LayerShape
from longspan.plan.tiles import FIRST_LOGIT_TILE_TOKENS, LOGIT_TILE_ELEMENTS

Bytes = dict[str, float]

RESERVE_BYTES, RESERVE_SHARE = 5 * GIB, 0.02
"""Of a device: the context of the driver, buffers of collectives, workspaces, and what an allocator cannot use."""

TRAVELLING = "travelling to and from host"

MOVING_BYTES = 4 << 30
"""Of kept tensors that are on their way to the host or back: a layer's, in and out, up to a quarter million tokens."""


def moving_products(setup: Setup) -> int:
    """Return the bytes on the device where products go to the host: of a layer that runs, and of one on its way."""
    return max(MOVING_BYTES, 2 * max(kept_bytes(Keep.PRODUCTS, setup, layer) for layer in setup.shape.layers))


WAITING_BYTES = 1 << 30
"""Of gradients that wait for their step, where it is taken inside backward."""

LIVE_PARAMETERS = 1_000_000_000
"""Parameters that DeepSpeed's stage 3 leaves gathered, unless its `stage3_max_live_parameters` says otherwise."""

HOST_RESERVE_BYTES, HOST_RESERVE_SHARE = 2 * GIB, 0.04
"""Of a host: each process, and a share that the system keeps."""


def kept_bytes(keep: Keep, setup: Setup, layer: LayerShape) -> int:
    """Return what a streamed layer keeps from forward to backward, on the rank that keeps most.

    Products are the attention's projected output and the MLP's gate and first product: nothing needs the result of the
    last one again.
    """
    size = LayerSize(
        tokens=setup.local,
        hidden=setup.shape.hidden,
        operands=layer,
        itemsize=setup.itemsize,
        x_itemsize=setup.itemsize,
        lse_itemsize=max(4, setup.itemsize),
        ulysses=setup.ulysses,
        whole=setup.ring > 1,
        products=setup.shape.hidden + 2 * layer.intermediate,
        ranks=setup.ulysses * setup.ring,
    )
    return kept.kept_bytes(keep, size)


def graph_bytes(setup: Setup, layer: LayerShape, tokens: int, compiled: bool) -> int:
    """Return the activations that autograd keeps of `tokens` tokens of a plain layer.

    Eager: both norms keep their input in float32, its product with their weight, and, if that is trained, the factor
    beside it; attention keeps q,
    k, v, its output and (exchanged) its output again; the MLP its gate before and after the activation, the other
    branch, and their product. Compiled code keeps less: measured on Llama-3-8B, 140 KiB per token
    where this gives 144.
    """
    c, d = setup.itemsize, setup.shape.hidden
    q, kv, out = layer.query_width, layer.kv_heads * (layer.head_dim + layer.v_head_dim), layer.out_width
    lse, outs = 4 * layer.heads, out * (2 if setup.ulysses > 1 else 1)
    if compiled:
        return tokens * (c * (4 * d + q + kv + outs + 3 * layer.intermediate) + lse)
    norms = 2 * d * (4 + c + (c if layer.trained == layer.parameters else 0))
    attention = c * (q + kv + outs) + lse
    return tokens * (norms + attention + c * 4 * layer.intermediate)


def _key_value_numbers(setup: Setup, layer: LayerShape) -> int:
    return setup.joined * setup.kv_heads(layer) * (layer.head_dim + layer.v_head_dim)


@dataclass(frozen=True)
class Moment:
    """A time at which memory may be fullest, and what is held then besides what layers keep.

    Args:
        layer: the layer that runs backward; None for another moment.
    """

    name: str
    layer: int | None
    causes: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes in all."""
        return sum(self.causes.values())


@dataclass(frozen=True)
class Ledger:
    """All bytes of a setup that do not depend on what layers keep.

    Args:
        moving_bytes: of what is kept on the host, and on its way there or back; 0: nothing leaves the device.
    """

    setup: Setup
    moving_bytes: int = 0

    @property
    def staged(self) -> bool:
        """Whether some of what is kept lies on the host, so that the next layer's is brought back early."""
        return self.moving_bytes > 0

    @property
    def capacity(self) -> float:
        """Bytes of a device that a step may use."""
        total = self.setup.cluster.gpu_bytes
        return total - self.reserve

    @property
    def reserve(self) -> float:
        """Bytes of a device that are left alone."""
        if not self.setup.cluster.machine.on_gpu:
            return HOST_RESERVE_BYTES + HOST_RESERVE_SHARE * self.setup.cluster.gpu_bytes
        return RESERVE_BYTES + RESERVE_SHARE * self.setup.cluster.gpu_bytes

    @cached_property
    def host(self) -> Bytes:
        """Bytes of a rank's share of its host, without kept tensors."""
        setup = self.setup
        state = setup.optimizer.host_bytes * setup.shape.trained / setup.shards("states")
        return {"optimizer": state} if state else {}

    @property
    def host_capacity(self) -> float:
        """Bytes of a rank's share of its host that may hold kept tensors."""
        if not self.setup.cluster.machine.on_gpu:
            return 0
        share = self.setup.cluster.host_bytes / self.setup.cluster.local_ranks
        return share * (1 - HOST_RESERVE_SHARE) - HOST_RESERVE_BYTES - sum(self.host.values())

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The moments in order; layers run backward from the last to the first."""
        count = len(self.setup.shape.layers)
        first = [Moment("forward", None, self._forward()), Moment("loss", None, self._loss())]
        norm = Moment("norm", None, self._norm())
        layers = [Moment("backward", i, self._backward(i)) for i in range(count - 1, -1, -1)]
        return (*first, norm, *layers, Moment("end", None, self._end()), Moment("step", None, self._step()))

    def graph_backward(self, layer: int) -> Moment:
        """Return the backward of a layer that keeps its graph, without that graph."""
        setup, shape = self.setup, self.setup.shape.layers[layer]
        width = 2 * shape.intermediate + 2 * setup.shape.hidden  # more than what backward has let go of by then
        causes = self._state(layer)
        causes["hidden states"] = 2 * self._x
        causes["tile"] = setup.local * width * setup.itemsize
        causes["gradient buffers"] = shape.trained * (setup.itemsize + (4 if setup.gathers else 0))
        if shape.packed:  # all products of the layer hold theirs
            causes["unpacked weights"] = shape.packed * setup.itemsize
        return Moment("backward", layer, causes)

    @property
    def _x(self) -> float:
        return self.setup.local * self.setup.shape.hidden * self.setup.itemsize

    def _state(self, layers_after: int | None) -> Bytes:
        """Return what is held throughout, with the gradients of the layers after one; None for none of them."""
        setup, shape, optimizer = self.setup, self.setup.shape, self.setup.optimizer
        frozen = shape.parameters - shape.trained
        weights = shape.trained * optimizer.weight_bytes + frozen * min(optimizer.weight_bytes, 4)
        causes: Bytes = {
            "parameters": weights / setup.shards("parameters"),
            "optimizer": shape.trained * optimizer.state_bytes / setup.shards("states"),
            "inputs": setup.local * (40 + 2 * shape.layers[0].head_dim * setup.itemsize),
        }
        if setup.ulysses > 1 and setup.cluster.machine.on_gpu:
            causes["exchanges"] = self._slots
        if setup.gathers:
            layers = 0 if layers_after is None else self._gathered
            causes["gathered parameters"] = shape.outside * setup.itemsize + layers
        causes["gradients"] = self._gradients(0)
        if layers_after is not None:
            done = sum(layer.trained for layer in shape.layers[layers_after + 1 :])
            waiting = WAITING_BYTES if optimizer.in_backward else 0
            causes["gradients"] = self._gradients(done) + self._head_gradient + waiting
        return causes

    def _gradients(self, done: int) -> float:
        """Return the bytes of the gradients of so many weights, and of memory that waits for others."""
        optimizer, trained = self.setup.optimizer, self.setup.shape.trained
        passing = optimizer.gradient_bytes - optimizer.standing_bytes
        return (done * passing + trained * optimizer.standing_bytes) / self.setup.shards("gradients")

    @property
    def _slots(self) -> float:
        """Shared buffers of the copy engines: of their own, and four for the largest exchange of a tile, with slack."""
        setup = self.setup
        largest = max(layer.query_width + 2 * layer.out_width for layer in setup.shape.layers) * setup.tile
        return (1 << 28) + 4 * min(1.25 * largest * setup.itemsize, GIB)

    @property
    def _gathered(self) -> float:
        """The layer at hand and the next, fetched early; DeepSpeed lets more stay than that."""
        layers, itemsize = self.setup.shape.layers, self.setup.itemsize
        both = 2 * max(itemsize * (la.parameters - la.packed) + la.packed_bytes for la in layers)
        if self.setup.engine != "zero-3":
            return both
        return max(both, itemsize * min(LIVE_PARAMETERS, sum(la.parameters for la in layers)))

    @property
    def _head_gradient(self) -> float:
        """The head's gradient, whole until backward ends."""
        setup = self.setup
        return setup.shape.head_trained * (setup.itemsize if setup.gathers else setup.optimizer.weight_bytes)

    def _forward(self) -> Bytes:
        """The last layer's forward."""
        setup, layer = self.setup, self.setup.shape.layers[-1]
        causes = self._state(None)
        if setup.gathers:
            causes["gathered parameters"] += self._gathered
        causes["hidden states"] = 2 * self._x
        causes["keys and values"] = _key_value_numbers(setup, layer) * setup.itemsize
        causes["tile"] = self._tile(layer, backward=False)
        if layer.packed:
            causes["unpacked weights"] = layer.packed * setup.itemsize
        if layer.recurrent:
            causes["recurrence"] = self._recurrence(layer, backward=False)
        elif setup.ring > 1:
            causes["ring"] = self._ring(layer, backward=False)
        if self.staged:  # it leaves when the layer is done
            causes["attention output"] = float(kept_bytes(Keep.OUT, setup, layer))
        return causes | self._staging

    def _loss(self) -> Bytes:
        """The tiles of the loss, between the head's hidden states and their gradient."""
        setup, shape = self.setup, self.setup.shape
        causes = self._state(None)
        first = FIRST_LOGIT_TILE_TOKENS * shape.vocabulary
        rest = min(setup.local * shape.vocabulary - first, LOGIT_TILE_ELEMENTS)
        wide = 12 if setup.itemsize >= 4 else 12 + setup.itemsize  # log-probabilities, and two gradients
        causes["loss"] = float(max(min(first, setup.local * shape.vocabulary), rest) * wide)
        causes["loss"] += shape.head_trained * (4 + setup.itemsize)
        norm = setup.local * shape.hidden * (setup.itemsize if setup.streams_norm else 4 + setup.itemsize)
        causes["hidden states"] = norm + 2 * self._x
        return causes

    def _norm(self) -> Bytes:
        """The backward of the last norm: run whole, several float32 copies of the hidden states."""
        setup, shape = self.setup, self.setup.shape
        causes = self._state(len(shape.layers) - 1)
        factor = 3 * setup.itemsize if setup.streams_norm else 20 + 2 * setup.itemsize
        causes["hidden states"] = setup.local * shape.hidden * factor
        return causes

    def _backward(self, index: int) -> Bytes:
        """A streamed layer's backward."""
        setup, layer = self.setup, self.setup.shape.layers[index]
        causes = self._state(index)
        causes["hidden states"] = (2 if self.in_place(index) else 3) * self._x
        tile_gradients = layer.trained * setup.itemsize
        reducing = 4 * layer.trained if setup.gathers else 0
        causes["gradient buffers"] = 4 * layer.trained + tile_gradients + reducing
        causes["tile"] = self._tile(layer, backward=True)
        if layer.packed:
            causes["unpacked weights"] = layer.packed * setup.itemsize
        if layer.recurrent:
            causes["recurrence"] = self._recurrence(layer, backward=True)
        elif setup.ring > 1:
            causes["ring"] = self._ring(layer, backward=True)
        else:
            causes["keys and values"] = self._prefix(layer)
        if self.staged:  # while a layer is rebuilt, its attention output stands where gradients of keys will
            rebuilt = _key_value_numbers(setup, layer) * setup.itemsize + kept_bytes(Keep.OUT, setup, layer)
            causes["keys and values"] = max(causes.get("keys and values", 0.0), float(rebuilt))
        return causes | self._staging

    def in_place(self, index: int) -> bool:
        """Whether the gradient of a streamed layer's hidden states takes their place, where they came from the host or
        were rebuilt; where they stayed, they are among what layers keep, and it has a place of its own."""
        return self.setup.ring == 1 and not self.setup.shape.layers[index].recurrent

    def _prefix(self, layer: LayerShape) -> float:
        """Keys and values of a layer, their gradients in float32, and a kernel's gradients of the longest prefix.

        A kernel that expands makes dk and dv for every query head; the others sum them up in float32.
        """
        setup, numbers = self.setup, _key_value_numbers(self.setup, layer)
        share = setup.query_heads(layer) / setup.kv_heads(layer)
        per_call: float = setup.itemsize
        if share > 1:
            per_call += share * setup.itemsize if setup.cluster.machine.rate(setup.kernel).expands else 4
        block = min(1.0, (setup.key_block_tokens or setup.joined) * setup.rows / setup.joined)
        return numbers * (setup.itemsize + max(4, setup.itemsize) + block * per_call)

    def _ring(self, layer: LayerShape, backward: bool) -> float:
        """Operands of attention over the whole shard, and what travels.

        Backward is fullest either while float32 gradients of keys and values go round, or while dq is sent home.
        """
        setup, c = self.setup, self.setup.itemsize
        q = setup.joined * setup.query_heads(layer) * layer.head_dim
        out = setup.joined * setup.query_heads(layer) * layer.v_head_dim
        kv = _key_value_numbers(setup, layer)
        if not backward:
            return c * (2 * q + 3 * out) + 3 * c * kv + 4 * out
        around = c * (2 * q + 2 * out) + kv * (3 * c + 12)
        home = c * (4 * q + 2 * out) + kv * (3 * c + 4)
        return 4 * q + max(around, home)

    def _recurrence(self, layer: LayerShape, backward: bool) -> float:
        """Operands of a recurrence over a stretch, as exchanged, convolved and activated, on the rank with most heads;
        in backward what its rule keeps besides (values and keys once more, a state per chunk) and all their
        gradients. Forward is reckoned at half of that."""
        setup = self.setup
        key_heads = setup.local * most_key_heads(layer, setup.ulysses * setup.ring)
        numbers = key_heads * recurrent_features(layer)
        states = key_heads / 64 * (layer.heads // layer.kv_heads) * layer.head_dim * layer.v_head_dim * setup.itemsize
        held = setup.recurrence_bytes * numbers + 2 * states
        return held if backward else held / 2

    def _tile(self, layer: LayerShape, backward: bool) -> float:
        """What a tile's computation holds."""
        setup, c, d, t = self.setup, self.setup.itemsize, self.setup.shape.hidden, self.setup.tile
        attention = t * c * 3 * (layer.query_width + layer.out_width)
        if not backward:
            return t * c * (3 * layer.intermediate + 4 * d) + attention
        if setup.compiled:
            return t * c * (5 * layer.intermediate + 8 * d) + attention
        return t * c * (6 * layer.intermediate + 8 * d) + attention

    @cached_property
    def _staging(self) -> Bytes:
        """Room for what is on its way to the host and back."""
        if not self.staged:
            return {}
        tiles = self.setup.shard_tokens / self.setup.tile
        outs = max(kept_bytes(Keep.OUT, self.setup, layer) for layer in self.setup.shape.layers)
        return {TRAVELLING: self.moving_bytes + 2 * outs / max(1.0, tiles)}

    def _end(self) -> Bytes:
        """The reduction of what lies outside the layers, all other gradients being there."""
        setup, shape = self.setup, self.setup.shape
        causes = self._state(-1)
        causes["hidden states"] = 2 * self._x
        own = shape.outside_trained
        if setup.gathers:
            causes["gathered parameters"] = 0.0
            causes["gradients"] -= self._head_gradient
            reduced = own * (4 + max(setup.itemsize, 4 / setup.shards("gradients")))
            causes["gradient buffers"] = reduced + 4 * shape.layers[0].trained
        else:
            causes["gradients"] += own * setup.optimizer.weight_bytes - self._head_gradient
        return causes

    def _step(self) -> Bytes:
        """The optimizer's step."""
        causes = self._state(None)
        causes.pop("gathered parameters", None)
        causes["gradients"] = self._gradients(self.setup.shape.trained)
        return causes

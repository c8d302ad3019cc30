"""What planning needs to know about a model: pure numbers, no modules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Args:
        intermediate: width of the MLP as one token sees it: that of its chosen experts together.
        parameters: numbers in all its weights.
        active: weights that one token is multiplied with; of experts, the chosen ones.
        query_key_value: those of them before attention, `key_value` of which make keys and values.
        down: those of the last product, which a derivative never needs again.
        trained: numbers in the weights that are trained.
        window: keys that a query sees at most; None for all before it.
        packed: numbers in quantised weights, which are made plain while the layer runs.
        packed_bytes: what these take until then.
        recurrent: the heads are those of a recurrent mixer, values and keys, in place of attention's.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    intermediate: int
    parameters: int
    active: int
    query_key_value: int
    key_value: int
    down: int
    trained: int
    window: int | None = None
    packed: int = 0
    packed_bytes: int = 0
    recurrent: bool = False

    @property
    def query_width(self) -> int:
        """Numbers per token in q."""
        return self.heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Numbers per token in the attention output."""
        return self.heads * self.v_head_dim

    def pairs(self, tokens: int) -> float:
        """Return how many keys the queries of one document see in total."""
        if self.window is None or self.window >= tokens:
            return tokens * (tokens + 1) / 2
        return self.window * (tokens - (self.window - 1) / 2)


@dataclass(frozen=True)
class ModelShape:
    """A causal language model.

    Args:
        outside: numbers in the weights outside the layers: embedding, head, last norm.
        outside_trained: those of them that are trained.
        head: weights of the output head, also where the embedding holds them.
        head_trained: numbers in the head that are trained.
        edited: first layers whose output is changed before the next one gets it (DeepStack), which must keep it then.
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[LayerShape, ...]
    outside: int
    outside_trained: int
    head: int
    head_trained: int
    edited: int = 0

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return self.outside + sum(layer.parameters for layer in self.layers)

    @property
    def trained(self) -> int:
        """Numbers in the weights that are trained."""
        return self.outside_trained + sum(layer.trained for layer in self.layers)

    @property
    def active(self) -> int:
        """Weights that one token is multiplied with."""
        return self.head + sum(layer.active for layer in self.layers)

    def flops(self, rows: int, tokens: int) -> float:
        """Count what a step must compute: forward and backward, causal attention, nothing computed again."""
        attention = sum(
            6.0 * layer.heads * (layer.head_dim + layer.v_head_dim) * layer.pairs(tokens) for layer in self.layers
        )
        return rows * (6.0 * self.active * tokens + attention)

"""How many ranks share the heads (Ulysses) and how many share the keys (ring)."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.errors import TopologyError


@dataclass(frozen=True)
class Degrees:
    """Sequence-parallel degrees and why they were chosen."""

    ulysses: int
    ring: int
    reason: str

    @property
    def size(self) -> int:
        """Number of sequence-parallel ranks."""
        return self.ulysses * self.ring


def choose_degrees(
    heads: int,
    kv_heads: int,
    size: int,
    node_size: int | None = None,
    *,
    ulysses: int | None = None,
    ring: int | None = None,
) -> Degrees:
    """Choose the degrees for `size` ranks.

    Ulysses takes the largest share of the ranks that divides the query heads and stays inside a node, because its
    traffic shrinks with the degree and its work is balanced for any mask; KV heads are replicated where they are
    fewer. The ring takes the rest. A degree given by hand is kept: Ulysses then also divides heads unevenly.

    Args:
        heads, kv_heads: query and KV heads of a layer.
        size: sequence-parallel ranks.
        node_size: ranks per node; None when all ranks share one.
        ulysses, ring: degrees set by hand.

    Raises:
        TopologyError: the degrees do not multiply to `size`, or Ulysses would leave a rank without a query head.
    """
    if size < 1:
        raise TopologyError(f"sequence_parallel_size must be at least 1, got {size}.")
    if ulysses is None and ring is None:
        node = min(size, node_size or size)
        fits = [u for u in range(1, node + 1) if size % u == 0 and heads % u == 0 and node % u == 0]
        return _explain(heads, kv_heads, Degrees(fits[-1], size // fits[-1], ""))
    if (ulysses is not None and ulysses < 1) or (ring is not None and ring < 1):
        raise TopologyError(f"Degrees must be at least 1, got ulysses_degree={ulysses}, ring_degree={ring}.")
    u = ulysses if ulysses is not None else size // (ring or 1)
    r = ring if ring is not None else size // u
    if u * r != size:
        raise TopologyError(
            f"ulysses_degree * ring_degree must be sequence_parallel_size, got {ulysses} and {ring} for {size}; "
            f"degrees that work: {', '.join(f'{d}x{size // d}' for d in range(1, size + 1) if size % d == 0)}."
        )
    if u > heads:
        raise TopologyError(
            f"ulysses_degree {u} would leave ranks without a query head: the model has {heads}. "
            f"Use ulysses_degree <= {heads} and give the rest to ring_degree, or set neither."
        )
    return _explain(heads, kv_heads, Degrees(u, r, ""))


def _explain(heads: int, kv_heads: int, degrees: Degrees) -> Degrees:
    u, r = degrees.ulysses, degrees.ring
    notes = [f"{heads} query heads over {u} rank{'s' if u > 1 else ''}"]
    if heads % u:
        notes.append(f"unevenly, at most {-(-heads // u)} each")
    if kv_heads % u:
        notes.append(f"{kv_heads} KV heads replicated where ranks share one")
    if r > 1:
        notes.append(f"keys and values in a zigzag ring of {r}, or gathered where rows are packed")
    elif u > 1:
        notes.append(f"rows of many short documents would move less with ring_degree={u}")
    return Degrees(u, r, "; ".join(notes))

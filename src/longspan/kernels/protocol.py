"""What every attention kernel offers, and what all of them need to know about a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.mask import Block


@dataclass(frozen=True)
class Score:
    """What becomes of q k^T before the softmax: softcap * tanh(scale * q k^T / softcap), or scale * q k^T without one.

    Source: the softcap is that of Gemma 2.
    """

    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Request:
    """What a kernel must be able to do.

    Args:
        head_dim: of queries and keys; v_head_dim: of values.
        varlen: several segments per call.
        bottom_right: causal calls with more keys than queries, where the last query sees the last key.
        single: calls of one query or one key.
        window: queries that do not see all keys before them, causal or not.
        softcap: scores that are capped.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    varlen: bool = False
    bottom_right: bool = False
    single: bool = False
    window: bool = False
    softcap: bool = False

    def __str__(self) -> str:
        dims = f"head_dim {self.head_dim}"
        if self.v_head_dim != self.head_dim:
            dims += f" (values {self.v_head_dim})"
        words = [str(self.dtype).removeprefix("torch."), dims, f"on {self.device.type}"]
        words += ["packed documents"] * self.varlen + ["causal with more keys than queries"] * self.bottom_right
        words += ["one token"] * self.single + ["a window"] * self.window + ["a softcap"] * self.softcap
        return ", ".join(words)


class Kernel(Protocol):
    """Attention of queries over one block of keys, with a backward that takes the final output and log-sum-exp.

    Given out and lse of the attention over *all* key blocks, P = exp(S - lse) and delta = rowsum(dout * out) make each
    block's gradients exact shares of the whole, so blocks can be computed anywhere and summed.
    """

    name: str

    def refuses(self, request: Request) -> str | None:
        """Say why this kernel cannot serve the request, or None if it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> tuple[Tensor, Tensor]:
        """Attend from the queries to this block of keys.

        Args:
            q: [B, Sq, H, D]; k: [B, Sk, K, D]; v: [B, Sk, K, Dv]; any strides with the last dim contiguous, K divides
                H, query head h reads key head h // (H / K).
            score: what becomes of q k^T before the softmax.

        Returns:
            out [B, Sq, H, Dv] in q's dtype and lse [B, H, Sq] (natural logarithm) in fp32, or fp64 for fp64.

        Raises:
            KernelError: the kernel cannot do this call.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's share of dq, dk and dv, in the operands' dtype or wider.

        Args:
            dout, out: [B, Sq, H, Dv]; lse: [B, H, Sq]: `out` and `lse` are those of the whole attention.
        """
        ...


class Borders(NamedTuple):
    """Segment borders on a device: int32 cumulative lengths and the longest segment, in tokens."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums and log-sum-exps are held in: fp32, or the operands' if wider."""
    return torch.promote_types(dtype, torch.float32)


def asked(q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> Request:
    """Describe a call as a request."""
    more_keys = block.cu_q != block.cu_k if block.varlen else q.shape[1] != k.shape[1]
    single = min(q.shape[1], k.shape[1]) == 1
    sizes = (q.device, q.dtype, q.shape[-1], v.shape[-1])
    capped = score.softcap is not None
    return Request(*sizes, block.varlen, block.causal and more_keys, single, block.left is not None, capped)


def check(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, block: Block, score: Score) -> None:
    """Raise if the kernel cannot do this call; it costs microseconds and no device work.

    Raises:
        KernelError: shapes that do not fit together, or a capability that the kernel does not have.
    """
    rows, queries, heads = q.shape[:3]
    keys, kv_heads = k.shape[1:3]
    if k.shape[:3] != v.shape[:3] or k.shape[0] != rows or q.shape[-1] != k.shape[-1] or heads % kv_heads:
        raise KernelError(
            f"Attention needs q [B, Sq, H, D], k [B, Sk, K, D] and v [B, Sk, K, Dv] with K dividing H, "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if not queries or not keys or (block.diagonal and not block.varlen and queries > keys):
        raise KernelError(
            f"An attention call needs at least one query and one key, and calls with causal order or a window no more "
            f"queries than keys; got {queries} queries and {keys} keys. Leave such blocks out of the schedule."
        )
    if block.varlen and rows != 1:
        raise KernelError(f"Packed documents are one row per call, got {rows} rows. Call once per row.")
    request = asked(q, k, v, block, score)
    if why := kernel.refuses(request):
        raise KernelError(f"Kernel '{kernel.name}' cannot do this call ({request}): {why}.{_way_out(kernel, request)}")


def _way_out(kernel: Kernel, request: Request) -> str:
    """Say what to do if the operands' type alone is refused: a kernel is picked before autocast is known of."""
    if kernel.refuses(replace(request, dtype=torch.bfloat16)) is not None:
        return ""
    return " Run the model under bf16 autocast or with bf16 weights, or choose kernel 'reference', which is slow."


def borders(q: Tensor, k: Tensor, block: Block) -> Borders:
    """Return a packed block's segment borders on the device of a call.

    Args:
        q: [1, Sq, H, D]; k: [1, Sk, K, D].

    Raises:
        KernelError: borders that do not fit the call; a kernel would leave rows unwritten.

    Cost: one copy to the device on the first call, kept in `block.cache`; later calls none.
    """
    key = ("borders", q.device, q.shape[1], k.shape[1])
    if key not in block.cache:
        segments(block, q.shape[1], k.shape[1])  # raises if the borders do not fit
        cu_q, cu_k = (
            torch.tensor(cu, dtype=torch.int32).to(q.device, non_blocking=True) for cu in (block.cu_q, block.cu_k)
        )
        block.cache[key] = Borders(cu_q, cu_k, block.max_q, block.max_k)
    made: Borders = block.cache[key]
    return made


def segments(block: Block, queries: int, keys: int) -> list[tuple[slice, slice]]:
    """List the query and key tokens of each segment; a dense call is one segment.

    Raises:
        KernelError: a segment without queries or keys, or, with causal order or a window, with more queries than keys.
    """
    if block.cu_q is None or block.cu_k is None:
        return [(slice(0, queries), slice(0, keys))]
    starts_q, starts_k = block.cu_q, block.cu_k
    ends = (starts_q[0], starts_q[-1], starts_k[0], starts_k[-1])
    if len(starts_q) != len(starts_k) or ends != (0, queries, 0, keys):
        raise KernelError(
            f"Segment borders {starts_q[0]} to {starts_q[-1]} and {starts_k[0]} to {starts_k[-1]}, of "
            f"{len(starts_q) - 1} and {len(starts_k) - 1} segments, do not fit {queries} queries and {keys} keys."
        )
    found = []
    for i in range(len(starts_q) - 1):
        q, k = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        length_q, length_k = q.stop - q.start, k.stop - k.start
        if length_q < 1 or length_k < 1 or (block.diagonal and length_q > length_k):
            raise KernelError(
                f"Segment {i} has {length_q} queries and {length_k} keys; every segment needs one of each, and "
                f"with causal order or a window no more queries than keys."
            )
        found.append((q, k))
    return found

"""The copy engine on GPUs of one node: buffers in symmetric memory, copies by the GPUs' copy engines, and the proof.

Copy engines are used where they can be and are shown to give what collectives give, bit for bit; what decided is said.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.comm.copy_engine import Copy, CopyEngine, Link
from longspan.comm.exchange import copy, to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.layout import Piece
from longspan.mesh import Axis, Mesh

SLOTS, SLOT_BYTES = 4, 64 * 2**20
"""A quarter of a GiB per GPU; tiles of 16,384 tokens of an 8B model are staged without waiting for others."""

_CHANNEL = 0
_TIMEOUT_MS = 30 * 60 * 1000
"""What a rank waits for the others before its process ends, as a collective's time-out would end it."""


def with_copy_engine(mesh: Mesh, device: torch.device, slot_bytes: int = SLOT_BYTES) -> tuple[Mesh, str | None]:
    """Make the Ulysses axis of a mesh exchange by copy engines if that works, else leave it to collectives.

    All ranks of an axis come to the same decision.

    Returns:
        The mesh, and what was decided and why; None where there is nothing to decide.

    Cost: collective over the axis; SLOTS * slot_bytes of GPU memory, and some small exchanges as a proof.
    """
    axis = mesh.ulysses
    if axis.size == 1 or device.type != "cuda":
        return mesh, None
    with torch.cuda.device(device):
        copier, why = _build(axis, torch.device("cuda", torch.cuda.current_device()), slot_bytes)
    if copier is None:
        return mesh, f"heads exchanged by NCCL: {why}"
    equipped = replace(mesh, ulysses=replace(axis, copier=copier))
    return equipped, "heads exchanged by copy engines, seen to equal NCCL"


def _build(axis: Axis, device: torch.device, slot_bytes: int) -> tuple[CopyEngine | None, str | None]:
    """Return a copy engine that works on all ranks, or why there is none."""
    place = _Place(device)
    places: list[Any] = [None] * axis.size
    dist.all_gather_object(places, place.told(), group=axis.group)
    if why := agreed(place.problem(places), axis):
        return None, why
    memory: Tensor | None = None
    link: SymmetricLink | None = None

    def allocate() -> None:
        nonlocal memory
        memory = allocate_symmetric(SLOTS * slot_bytes, device)

    def connect() -> None:
        nonlocal link
        assert memory is not None
        link = SymmetricLink(memory, SLOTS, axis)

    for step in (allocate, connect):
        if why := agreed(problem_of(step), axis):
            return None, why
    assert link is not None
    return proven(link, axis, device)


def proven(link: Link, axis: Axis, device: torch.device) -> tuple[CopyEngine | None, str | None]:
    """Return a copy engine if it gives what collectives give on every rank, or where it does not.

    The sizes are odd and the heads uneven; all exchanges are under way at once, and take every slot more than once.
    """
    copier = CopyEngine(link)
    why = agreed(problem_of(lambda: _compare(copier, axis, link.slots, device)), axis)
    return (copier, None) if why is None else (None, why)


def agreed(why: str | None, axis: Axis) -> str | None:
    """Return what the first rank that has a problem says, on every rank; None if no rank has one."""
    reasons: list[str | None] = [None] * axis.size
    dist.all_gather_object(reasons, why, group=axis.group)
    found = [f"{reason} (rank {axis.ranks[rank]})" for rank, reason in enumerate(reasons) if reason is not None]
    return found[0] if found else None


def problem_of(step: Callable[[], None]) -> str | None:
    """Say how a step of the way fails, or None.

    Symmetric memory fails in many ways, by version, driver, container and topology; each means that collectives are
    used, and the reason is kept.
    """
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return None


class _Place:
    """Where a rank computes."""

    def __init__(self, device: torch.device) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id")  # hosts may share a name; none shares this
        self.host = boot.read_text().strip() if boot.exists() else socket.gethostname()
        self.uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        self.index = device.index

    def told(self) -> tuple[str, str]:
        """Return what other ranks need to know."""
        return self.host, self.uuids[self.index]

    def problem(self, places: Sequence[tuple[str, str]]) -> str | None:
        """Say why the GPUs of all ranks cannot copy from each other, as far as this rank sees."""
        if len({host for host, _ in places}) > 1:
            return "the ranks are on several nodes"
        if len({uuid for _, uuid in places}) < len(places):
            return "ranks share a GPU"
        for _, uuid in places:
            other = self.uuids.index(uuid) if uuid in self.uuids else self.index
            if other != self.index and not torch.cuda.can_device_access_peer(self.index, other):
                return f"GPU {self.index} cannot access GPU {other}"
        return None


def allocate_symmetric(size: int, device: torch.device) -> Tensor:
    """Return memory of its own that other processes can map, uint8 [size]."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)


class SymmetricLink:
    """A link over symmetric memory: meetings are its barriers, fetches 2-D copies of the CUDA runtime.

    Both have a stream of their own, of high priority: a meeting takes one warp for a moment, a fetch no multiprocessor.

    Args:
        memory: of `allocate_symmetric`, of the same size on every rank.

    Cost: collective over the axis.
    """

    def __init__(self, memory: Tensor, slots: int, axis: Axis) -> None:
        from torch.distributed import _symmetric_memory

        assert axis.group is not None
        self.memory, self.slots, self.slot_bytes = memory, slots, memory.numel() // slots
        self.runtime = Runtime()
        self.handle: Any = _symmetric_memory.rendezvous(memory, axis.group)
        self.size, self.rank = axis.size, axis.rank
        if (self.handle.world_size, self.handle.rank) != (axis.size, axis.rank):
            raise RuntimeError("the ranks of the process group are in another order than those of the mesh")
        self.buffers = [
            self.handle.get_buffer(rank, (slots, self.slot_bytes), torch.uint8).unbind() for rank in range(axis.size)
        ]
        self.meeting, self.fetching = (torch.cuda.Stream(memory.device, priority=-1) for _ in range(2))
        self._try_out()

    def _try_out(self) -> None:
        """Copy from every rank without meeting it, so that what cannot work fails before anybody waits."""
        seen = torch.empty(1, 2, 1, 16, dtype=torch.uint8, device=self.memory.device)
        for slots in self.buffers:
            self.runtime.copy(seen, slots[0][:64].view(1, 2, 1, 32)[..., :16], self.fetching.cuda_stream)
        self.fetching.synchronize()

    def slot(self, rank: int, number: int) -> Tensor:
        """See `Link.slot`."""
        return self.buffers[rank][number]

    def stage(self, after: Sequence[Any], copies: Sequence[Copy]) -> Any:
        """Copy on the current stream, by kernels: they take any strides at full bandwidth."""
        stream = torch.cuda.current_stream(self.memory.device)
        for mark in after:
            stream.wait_event(mark)
        for destination, source in copies:
            copy(destination, source)
        return stream.record_event()

    def meet(self, after: Sequence[Any]) -> Any:
        """See `Link.meet`."""
        for mark in after:
            self.meeting.wait_event(mark)
        with torch.cuda.stream(self.meeting):
            self.handle.barrier(_CHANNEL, _TIMEOUT_MS)
        return self.meeting.record_event()

    def fetch(self, after: Sequence[Any], copies: Sequence[Copy]) -> Any:
        """See `Link.fetch`."""
        for mark in after:
            self.fetching.wait_event(mark)
        for destination, source in copies:
            self.runtime.copy(destination, source, self.fetching.cuda_stream)
        return self.fetching.record_event()

    def wait(self, mark: Any) -> None:
        """See `Link.wait`."""
        torch.cuda.current_stream(self.memory.device).wait_event(mark)

    def passed(self, mark: Any) -> bool:
        """See `Link.passed`."""
        return mark.query()


class Runtime:
    """The copies of the CUDA runtime that PyTorch does not offer.

    Raises:
        OSError: the runtime that this PyTorch uses is not found.
    """

    def __init__(self) -> None:
        self.library: Any = ctypes.CDLL(_runtime_path())
        self.library.cudaGetErrorString.restype = ctypes.c_char_p
        size = ctypes.c_size_t
        pointer = ctypes.c_void_p
        self.library.cudaMemcpy2DAsync.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]

    def copy(self, destination: Tensor, source: Tensor, stream: int) -> None:
        """Queue a copy between views [B, n, h, D] whose last two dims are dense."""
        for to, start in zip(destination.unbind(0), source.unbind(0), strict=True):
            to_pitch, from_pitch, width, height = lines(to, start)
            if not width * height:
                continue
            error = self.library.cudaMemcpy2DAsync(
                to.data_ptr(), to_pitch, start.data_ptr(), from_pitch, width, height, _DEFAULT, stream
            )
            if error:
                raise RuntimeError(f"cudaMemcpy2DAsync: {self.library.cudaGetErrorString(error).decode()}")


_DEFAULT = 4
"""cudaMemcpyDefault: the direction follows from the addresses."""


def lines(destination: Tensor, source: Tensor) -> tuple[int, int, int, int]:
    """Describe a copy between views [n, h, D] as lines: pitch of either, width and height, in bytes and lines.

    What lies dense in both is one line, which is a plain copy.
    """
    n, heads, dim = source.shape
    item, width = source.element_size(), heads * dim * source.element_size()
    for view in (destination, source):
        if view.shape != source.shape or view.dtype != source.dtype or (dim > 1 and view.stride(2) != 1):
            raise ValueError(f"No lines lead from {tuple(source.shape)} to {tuple(view.shape)}.")
        if heads > 1 and view.stride(1) != dim:
            raise ValueError(f"The heads of a view lie {view.stride(1)} elements apart, not {dim}.")
    pitches = [view.stride(0) * item if n > 1 else width for view in (destination, source)]
    if pitches == [width, width]:
        return n * width, n * width, n * width, min(n, 1)
    return pitches[0], pitches[1], width, n


def _runtime_path() -> str:
    """Return the file of the CUDA runtime that PyTorch has loaded into this process."""
    name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(name):
            return path
    raise OSError(f"{name} is not loaded into this process")


def _compare(copier: CopyEngine, axis: Axis, slots: int, device: torch.device) -> None:
    """Raise if some exchange differs from a collective's, once all have ended: other ranks may see no difference."""
    different = set()
    for dtype in (torch.bfloat16, torch.float32):
        flying = [_exchanges(copier, axis, slots + 2 + number, dtype, device) for number in range(slots + 2)]
        for there, back in flying:
            for name, pair in (("heads", there), ("tokens", back)):
                found, true = (pending.wait() for pending in pair)
                if not all(_same_bits(a, b) for a, b in zip(found, true, strict=True)):
                    different.add(name)
    if different:
        raise RuntimeError(f"an exchange to {' and to '.join(sorted(different))} differs from the collective's")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _exchanges(copier: CopyEngine, axis: Axis, seed: int, dtype: torch.dtype, device: torch.device) -> list[Any]:
    """Start an exchange of random bits in either direction, each by copy engines and by a collective."""
    split, tokens = HeadSplit(3 * axis.size + 3, axis.size + 1, axis.size), 31 + seed
    heads, dims = [split.query, split.key, split.key], [16, 16, 8]
    parts = [Piece(0, 12), Piece(12, 24), Piece(24, tokens)] if seed % 2 else []
    made = torch.Generator(device).manual_seed(seed * axis.size + axis.rank)

    def normal(tokens: int, counts: Sequence[int]) -> list[Tensor]:
        shapes = [(2, tokens, n, d) for n, d in zip(counts, dims, strict=True)]
        return [torch.randn(shape, generator=made, device=device).to(dtype) for shape in shapes]

    plain = replace(axis, copier=None)
    whole = normal(tokens, [split.heads, split.kv_heads, split.kv_heads])
    some = normal(tokens * axis.size, [len(h[axis.rank]) for h in heads])
    there = copier.to_heads(whole, heads, parts), to_heads(whole, heads, plain, parts)
    return [there, (copier.to_tokens(some, heads, parts), to_tokens(some, heads, plain, parts))]

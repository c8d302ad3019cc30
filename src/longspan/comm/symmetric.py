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

from longspan.comm.copy_engine import SLOTS, CopyEngine
from longspan.comm.exchange import to_heads, to_tokens
from longspan.comm.heads import HeadSplit
from longspan.comm.link import Copy, SharedMemoryError, Slots
from longspan.layout import Piece
from longspan.mesh import Axis, Mesh

SLOT_BYTES = 64 * 2**20
"""Of each slot through which chunks pass, a quarter of a GiB per GPU."""

LENT_BYTES = 2**30
"""The most of each slot for borrowed results, which are made as they are asked for."""

_CHANNEL = 0
_TIMEOUT_MS = 30 * 60 * 1000
"""What a rank waits for the others before its process ends, as a collective's time-out would end it."""


def with_copy_engine(
    mesh: Mesh, device: torch.device, slot_bytes: int = SLOT_BYTES, lent_bytes: int = LENT_BYTES
) -> tuple[Mesh, str | None]:
    """Make the Ulysses axis of a mesh exchange by copy engines if that works, else leave it to collectives.

    All ranks of an axis come to the same decision.

    Args:
        slot_bytes, lent_bytes: as for `CopyEngine`.

    Returns:
        The mesh, and what was decided and why; None where there is nothing to decide.

    Cost: collective over the axis; the slots in GPU memory, and some small exchanges as a proof.
    """
    axis = mesh.ulysses
    if axis.size == 1 or device.type != "cuda":
        return mesh, None
    with torch.cuda.device(device):
        copier, why = _build(axis, torch.device("cuda", torch.cuda.current_device()), slot_bytes, lent_bytes)
    if copier is None:
        return mesh, f"heads exchanged by NCCL: {why}"
    equipped = replace(mesh, ulysses=replace(axis, copier=copier))
    return equipped, "heads exchanged by copy engines, seen to equal NCCL"


def _build(axis: Axis, device: torch.device, slot_bytes: int, lent_bytes: int) -> tuple[CopyEngine | None, str | None]:
    """Return a copy engine that works on all ranks, or why there is none."""
    place = _Place(device)
    places: list[Any] = [None] * axis.size
    dist.all_gather_object(places, place.told(), group=axis.group)
    if why := agreed(place.problem(places), axis):
        return None, why
    link: SymmetricLink | None = None

    def connect() -> None:
        nonlocal link
        link = SymmetricLink(axis, device)

    if why := agreed(problem_of(connect), axis):
        return None, why
    assert link is not None
    try:
        copier = CopyEngine(link, slot_bytes, lent_bytes, waits=axis.waits)
    except SharedMemoryError as error:
        return None, str(error)
    return proven(copier, axis, device)


def proven(copier: CopyEngine, axis: Axis, device: torch.device) -> tuple[CopyEngine | None, str | None]:
    """Return a copy engine if it gives what collectives give on every rank, or where it does not.

    The sizes are odd and the heads uneven; results are copied and borrowed, exchanges are under way together, and take
    every slot more than once.
    """
    why = agreed(problem_of(lambda: _compare(copier, axis, device)), axis)
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
    """A link over symmetric memory: meetings are its barriers, copies 2-D copies of the CUDA runtime.

    Pushes and meetings have a stream, copies within the rank another one, of high priority: a meeting takes one warp
    for a moment, a copy no multiprocessor.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.size, self.rank, self.device = axis, axis.size, axis.rank, device
        self.runtime = Runtime()
        self.meeting: Any = None  # the handle whose barriers are the meetings
        self.pushing, self.copying = (torch.cuda.Stream(device, priority=-1) for _ in range(2))

    def allocate(self, count: int, slot_bytes: int) -> Slots:
        """See `Link.allocate`; what PyTorch keeps for later is given back first."""
        memory: Tensor | None = None
        slots: Slots | None = None

        def allocate() -> None:
            nonlocal memory
            torch.cuda.empty_cache()
            memory = allocate_symmetric(count * slot_bytes, self.device)

        def connect() -> None:
            nonlocal slots
            assert memory is not None
            slots = self._connect(memory, count, slot_bytes)

        for step in (allocate, connect):  # who cannot do one must not leave the others alone in the next
            if why := agreed(problem_of(step), self.axis):
                raise SharedMemoryError(why)
        assert slots is not None
        return slots

    def _connect(self, memory: Tensor, count: int, slot_bytes: int) -> Slots:
        """Map the memory of all ranks, and read some of it, so that what cannot work fails before anybody waits."""
        from torch.distributed import _symmetric_memory

        assert self.axis.group is not None
        handle: Any = _symmetric_memory.rendezvous(memory, self.axis.group)
        if (handle.world_size, handle.rank) != (self.size, self.rank):
            raise RuntimeError("the ranks of the process group are in another order than those of the mesh")
        buffers = [handle.get_buffer(rank, (count, slot_bytes), torch.uint8).unbind() for rank in range(self.size)]
        seen = torch.empty(1, 2, 1, 16, dtype=torch.uint8, device=self.device)
        for slots in buffers:
            self.runtime.copy(seen, slots[0][:64].view(1, 2, 1, 32)[..., :16], self.copying.cuda_stream)
        self.copying.synchronize()
        self.meeting = self.meeting or handle
        return Slots(buffers, (memory, handle))

    def ready(self) -> Any:
        """See `Link.ready`: the caller's queue is the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def push(self, after: Sequence[Any], copies: Sequence[Copy]) -> None:
        """See `Link.push`."""
        self._queue(self.pushing, after, copies)

    def meet(self, after: Sequence[Any]) -> Any:
        """See `Link.meet`."""
        self._queue(self.pushing, after, ())
        with torch.cuda.stream(self.pushing):
            self.meeting.barrier(_CHANNEL, _TIMEOUT_MS)
        return self.pushing.record_event()

    def copy(self, after: Sequence[Any], copies: Sequence[Copy]) -> Any:
        """See `Link.copy`."""
        self._queue(self.copying, after, copies)
        return self.copying.record_event()

    def _queue(self, stream: Any, after: Sequence[Any], copies: Sequence[Copy]) -> None:
        for mark in after:
            stream.wait_event(mark)
        for destination, source in copies:
            self.runtime.copy(destination, source, stream.cuda_stream)

    def wait(self, mark: Any) -> None:
        """See `Link.wait`."""
        torch.cuda.current_stream(self.device).wait_event(mark)

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


def _compare(copier: CopyEngine, axis: Axis, device: torch.device) -> None:
    """Raise if some exchange differs from a collective's, once all have ended: other ranks may see no difference."""
    different: set[str] = set()

    def check(flying: list[Any]) -> None:
        for name, pair in zip(("heads", "tokens"), flying, strict=True):
            found, true = (pending.wait() for pending in pair)
            if not all(_same_bits(a, b) for a, b in zip(found, true, strict=True)):
                different.add(name)

    for dtype in (torch.bfloat16, torch.float32):
        seeds = range(SLOTS + 2, 2 * SLOTS + 4)
        for flying in [_exchanges(copier, axis, seed, dtype, device, False) for seed in seeds]:
            check(flying)
        for seed in seeds:  # what is borrowed is not to be had for long
            check(_exchanges(copier, axis, seed, dtype, device, True))
    if different:
        raise RuntimeError(f"an exchange to {' and to '.join(sorted(different))} differs from the collective's")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _exchanges(
    copier: CopyEngine, axis: Axis, seed: int, dtype: torch.dtype, device: torch.device, borrow: bool
) -> list[Any]:
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
    there = copier.to_heads(whole, heads, parts, borrow), to_heads(whole, heads, plain, parts)
    return [there, (copier.to_tokens(some, heads, parts, borrow), to_tokens(some, heads, plain, parts))]
